"""What a machine allows: no engine can generate faster than weights and caches are read and products are computed.

In: a model's sizes and the lengths of all requests. Out: seconds, and tokens in a second, if every byte moved as
fast as a copy does, every sequence ran from the start, and nothing else took any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tessera.machines import Machine


@dataclass(frozen=True)
class Model:
    """What a step reads: weights once, and what is kept of every token that is looked at."""

    parameters: int  # that products read: no embedding that is only looked up
    weight_bytes: float
    token_bytes: int  # keys and values of one token, in all layers


def model_of(network: nn.Module, weight_bytes_each: float, cache_bytes_each: int) -> Model:
    """The sizes of a model of transformers."""
    config = network.config
    counted = sum(p.numel() for p in network.parameters())
    embedding = network.get_input_embeddings().weight.numel()  # type: ignore[operator]
    parameters = counted if config.tie_word_embeddings else counted - embedding  # type: ignore[union-attr]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads  # type: ignore[union-attr]
    kept = 2 * config.num_hidden_layers * config.num_key_value_heads * head * cache_bytes_each  # type: ignore[union-attr]
    return Model(parameters, parameters * weight_bytes_each, int(kept))  # type: ignore[arg-type]


def seconds(model: Model, lengths: Sequence[tuple[int, int]], machine: Machine, matrix: str = "bfloat16") -> float:
    """The least time for requests of these lengths (tokens in, tokens out), all of them at once."""
    name = f"matrix.{matrix}"
    rate = machine[name] if name in machine.figures else machine.matrix_flops
    steps = max(out for _, out in lengths)
    seen = sum(before * out + out * (out + 1) // 2 for before, out in lengths)
    moved = steps * model.weight_bytes + seen * model.token_bytes
    return moved / machine.bandwidth + 2 * model.parameters * sum(before for before, _ in lengths) / rate
