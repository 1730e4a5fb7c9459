"""What operators ask of values: the numbers in a tensor, where those decide a size.

While a graph becomes a Trace its tensors hold nothing. Some are known all the same: constants of the file, arithmetic
on sizes (`sizes.py`). Asking for another one raises `ValueNeeded`; whoever imports the graph then reads it at the
call.
"""

from __future__ import annotations

import numpy as np
import torch

from tessera.frontends.onnx.elements import Narrow
from tessera.frontends.onnx.sizes import Sizes, listed
from tessera.torch_internals.dispatch import disable_current_modes
from tessera.torch_internals.fake import FakeTensor
from tessera.util.errors import TesseraError


class ValueNeeded(TesseraError):
    """A size depends on what this tensor holds."""

    def __init__(self, value: object) -> None:
        super().__init__("a size depends on the values of a tensor")
        self.value = value


class Untraceable(TesseraError):
    """This operator, on these inputs, does not become equations; the message says why."""


def is_known(x: object) -> bool:
    """Its contents can be looked at now."""
    if isinstance(x, Narrow):
        return is_known(x.data)
    if isinstance(x, (list, tuple)):
        return all(map(is_known, x))
    return not isinstance(x, FakeTensor)


def numbers(x: object) -> list:
    """All elements of a tensor, in order, as Python numbers or symbolic sizes."""
    if isinstance(x, Sizes):
        return x.array.ravel().tolist()
    if isinstance(x, Narrow):
        x = x.data
    if isinstance(x, FakeTensor):
        raise ValueNeeded(x)
    if isinstance(x, torch.Tensor):
        return listed(x)
    return np.asarray(x).ravel().tolist()


def number(x: object) -> int | float:
    values = numbers(x)
    if len(values) != 1:
        raise ValueError(f"expected one number, got {len(values)}")
    return values[0]


def contents(x: object, why: str) -> object:
    """The tensor itself, where its contents decide more than one size."""
    if not is_known(x):
        raise Untraceable(why)
    return x


def literal(values: object, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose contents stay known, whatever is being recorded."""
    with disable_current_modes():
        return torch.tensor(values, dtype=dtype)
