"""Where serving is measured: models with random weights, prompts of random tokens, and a figure beside its bounds.

In: a device, and whether sizes are those of a CPU. Out: `Measured` figures, whose limits are what the machine allows.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import torch

from tessera.machines import Machine, machine, machine_of
from tessera.serve.engine import Engine
from tessera.serve.stream import Stream
from tessera.tools.bench import serve_limit

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Say = Callable[[str], None]
Lengths = list[tuple[int, int]]
QWEN, LLAMA = "Qwen3-0.6B", "Llama-3.1-8B"


@dataclass
class Measured:
    """One figure. `limit` is the best that the machine allows; `bound` what is asked, at least or at most."""

    job: str
    what: str
    value: float | None  # None: it could not be measured, and `note` says why
    unit: str = ""
    bound: float | None = None
    at_least: bool = True
    limit: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        if self.value is None:
            return False
        if self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:,.4g} {self.unit}"
        return f"{self.job}, {self.what}: {value}" + (f" ({self.note})" if self.note else "")


@dataclass
class Place:
    """Where and how large: the device, and whether sizes are those of a CPU."""

    device: str
    tiny: bool = False
    say: Say = print
    options: dict[str, object] = field(default_factory=dict)

    def count(self, number: int) -> int:
        return max(2, number // 32) if self.tiny else number

    @property
    def small(self) -> str:
        """Memory for the cache where one or a few requests run."""
        return "64MB" if self.tiny else "8GB"

    @property
    def flags(self) -> list[str]:
        """What commands are told besides."""
        return ["--device", self.device] + ["--no-compile"] * (self.options.get("compiled") is False)


def config_of(name: str, tiny: bool) -> PretrainedConfig:
    """What a model looks like; nothing is fetched."""
    from transformers import LlamaConfig, Qwen3Config

    if name == QWEN:
        config = Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )  # fmt: skip
    else:
        config = LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        )  # fmt: skip
    if tiny:
        for key, value in (("vocab_size", 12000), ("hidden_size", 64), ("intermediate_size", 128), ("head_dim", 16)):
            setattr(config, key, value)
        config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 2, 4, 2
    # few CPUs multiply in 16 bits: elsewhere PyTorch does so number by number
    config.dtype = torch.float32 if tiny else torch.bfloat16
    return config


def network(name: str, place: Place) -> PreTrainedModel:
    """A model with random weights, drawn where it will be."""
    from transformers import AutoModelForCausalLM

    config = config_of(name, place.tiny)
    torch.manual_seed(0)
    with torch.device(place.device):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()


def built(model: PreTrainedModel, place: Place, longest: int, **options: object) -> Engine:
    place.say("building the engine")
    shared = {"longest": longest, "reuse": False, "device": place.device, **place.options}
    memory = {"memory": place.small} if place.tiny else {}
    engine = Engine(model, **{**shared, **memory, **options})  # type: ignore[arg-type]
    engine.warm(engine.scheduler.most_running)
    engine.generate([[1, 2, 3, 4, 5]] * 2, max_tokens=2)
    gc.freeze()  # as the server's process does
    return engine


def random_prompts(lengths: Lengths, seed: int = 0) -> list[list[int]]:
    draw = Random(seed)
    return [[draw.randint(0, 10000) for _ in range(given)] for given, _ in lengths]


def usual(place: Place, count: int = 256) -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of new tokens as small engines are often measured: 142,827 in, 133,966 out for 256."""
    draw, count = Random(0), place.count(count)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(count)]
    outs = [draw.randint(100, 1024) for _ in range(count)]
    return [prompt[: place.count(len(prompt))] for prompt in prompts], list(map(place.count, outs))


def finish(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def graphs(engine: Engine) -> str:
    """How many sizes are replayed, or why none is."""
    of_engine = engine._programs.graphs
    if of_engine is None:
        return "no CUDA graphs"
    return f"no CUDA graphs: {of_engine.reason}" if of_engine.reason else f"{len(of_engine.captured)} CUDA graphs"


def here(place: Place) -> Machine:
    """Whose figures limits are made of."""
    return machine_of(torch.device("cuda")) if place.device == "cuda" else machine("h200")


def least(
    model: PreTrainedModel, lengths: Lengths, place: Place, weight: float = 2, cache: int = 2, matrix: str = "bfloat16"
) -> float:
    """Seconds that the machine needs for requests of these lengths, all of them at once."""
    return serve_limit.seconds(serve_limit.model_of(model, weight, cache), lengths, here(place), matrix)


def free() -> None:
    """Give back what engines that are gone have held."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def watched(engine: Engine, streams: list[Stream], until: Callable[[], bool]) -> list[list[float]]:
    """Step until then: when each token of each stream came."""
    times: list[list[float]] = [[] for _ in streams]
    while not until():
        engine.step()
        now = time.perf_counter()
        for mine, stream in zip(times, streams, strict=True):
            pieces = stream.request.pieces
            while pieces:
                mine.extend([now] * len(pieces.popleft().tokens))
    return times
