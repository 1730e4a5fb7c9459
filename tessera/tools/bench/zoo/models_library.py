"""Models of transformers, made from their configurations with random weights: nothing is downloaded.

In: the name of a class, its configuration, and the sizes of a batch. Out: the model behind a forward that takes tensors
by position and gives the loss, or the logits where no labels are given.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tessera.tools.bench.zoo.network import Drawn

Named = dict[str, Tensor]


class ByPosition(nn.Module):
    """A model whose inputs have names, called by position."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], fixed: dict[str, object]):
        super().__init__()
        self.model, self.names, self.fixed = model, names, fixed

    def forward(self, *given: Tensor) -> Tensor:
        named = dict(zip(self.names, given, strict=False))
        out = self.model(**named, **self.fixed)
        return out.loss if "labels" in named else out.logits


def text(config: Any, batch: int, time: int) -> tuple[Named, Named]:
    ids = torch.randint(5, config.vocab_size, (batch, time))
    return {"input_ids": ids}, {"labels": ids.clone()}


def padded_text(config: Any, batch: int, time: int) -> tuple[Named, Named]:
    """Sequences of different lengths, filled up at their ends; a label for every token, as in masked training."""
    inputs, labels = text(config, batch, time)
    lengths = torch.linspace(time // 2, time, batch).long()
    mask = torch.arange(time)[None] < lengths[:, None]
    labels["labels"] = labels["labels"].masked_fill(~mask, -100)
    return inputs | {"attention_mask": mask.long()}, labels


def translation(config: Any, batch: int, time: int, target: int) -> tuple[Named, Named]:
    inputs, _ = text(config, batch, time)
    after, labels = text(config, batch, target)
    return inputs | {"decoder_input_ids": after["input_ids"]}, labels


def images(config: Any, batch: int, side: int) -> tuple[Named, Named]:
    return {"pixel_values": torch.randn(batch, 3, side, side)}, {"labels": torch.randint(config.num_labels, (batch,))}


def segments(config: Any, batch: int, side: int) -> tuple[Named, Named]:
    labels = torch.randint(config.num_labels, (batch, side, side))
    return {"pixel_values": torch.randn(batch, 3, side, side)}, {"labels": labels}


def spectrum(config: Any, batch: int, length: int, target: int) -> tuple[Named, Named]:
    inputs, labels = text(config, batch, target)
    features = torch.randn(batch, config.num_mel_bins, length)
    return {"input_features": features, "decoder_input_ids": inputs["input_ids"]}, labels


def sound(config: Any, batch: int, length: int, target: int) -> tuple[Named, Named]:
    return {"input_values": torch.randn(batch, length)}, {
        "labels": torch.randint(1, config.vocab_size, (batch, target))
    }


INPUTS: dict[str, Callable[..., tuple[Named, Named]]] = {
    f.__name__: f for f in (text, padded_text, translation, images, segments, spectrum, sound)
}


def library(
    model: str, inputs: str, config: dict[str, Any], fixed: dict[str, object] | None = None, **sizes: int
) -> Drawn:
    model_class = getattr(import_module("transformers"), model)
    configured = model_class.config_class(**config)
    drawn, targets = INPUTS[inputs](configured, **sizes)
    names = (*drawn, *targets)
    return ByPosition(model_class(configured), names, fixed or {}), tuple(drawn.values()), tuple(targets.values())
