"""Sequences and optionals: Python lists, and None."""

from __future__ import annotations

import numpy as np
import torch

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import literal, number, numbers

Tensor = torch.Tensor


def _place(position: object, length: int, what: str) -> int:
    place = int(number(position))
    if not -length <= place < length:
        raise OnnxError(f"{what}: position {place} of a sequence of {length}")
    return place


@operator("SequenceEmpty", 11)
def sequence_empty(*, dtype: int = 1) -> list:
    return []


@operator("SequenceConstruct", 11)
def sequence_construct(*xs: object) -> list:
    return list(xs)


@operator("SequenceInsert", 11, sizes=(2,))
def sequence_insert(xs: list, x: object, position: object = None) -> list:
    place = len(xs) if position is None else int(number(position))
    if not -len(xs) <= place <= len(xs):
        raise OnnxError(f"SequenceInsert: position {place} of a sequence of {len(xs)}")
    return [*xs[:place], x, *xs[place:]]


@operator("SequenceErase", 11, sizes=(1,))
def sequence_erase(xs: list, position: object = None) -> list:
    place = _place(position, len(xs), "SequenceErase") if position is not None else len(xs) - 1
    return [x for i, x in enumerate(xs) if i != place % len(xs)]


@operator("SequenceAt", 11, sizes=(1,))
def sequence_at(xs: list, position: object) -> object:
    return xs[_place(position, len(xs), "SequenceAt")]


@operator("SequenceLength", 11)
def sequence_length(xs: list) -> Tensor:
    return literal(len(xs), torch.int64)


@operator("ConcatFromSequence", 11)
def concat_from_sequence(xs: list, *, axis: int, new_axis: int = 0) -> object:
    if xs and isinstance(xs[0], np.ndarray):
        return np.stack(xs, axis) if new_axis else np.concatenate(xs, axis)
    return torch.stack(xs, axis) if new_axis else torch.cat(xs, axis)


@operator("SplitToSequence", 11, sizes=(1,))
def split_to_sequence(x: Tensor, split: Tensor | None = None, *, axis: int = 0, keepdims: int = 1) -> list:
    if split is None:
        parts = torch.split(x, 1, axis)
        return [p if keepdims else p.squeeze(axis) for p in parts]
    sizes = numbers(split)
    return list(torch.split(x, sizes if len(split.shape) else int(sizes[0]), axis))


@operator("Optional", 15)
def optional(x: object = None, *, type: object = None) -> object:
    return x


@operator("OptionalHasElement", 15)
def optional_has_element(x: object = None) -> Tensor:
    return literal(x is not None, torch.bool)


@operator("OptionalGetElement", 15)
def optional_get_element(x: object) -> object:
    if x is None:
        raise OnnxError("OptionalGetElement: the optional is empty")
    return x
