"""What the values of a running program are: tensors, and two kinds that are known without one.

`Splat` is one number at every place of a shape: constants are mostly that, and operators take the number itself.
`Sizes` are integers that come from sizes of tensors, as Python has them, symbols included: what a program computes
with them decides shapes, which no tensor of a recorded program can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tessera.frontends.stablehlo.elements import Element
from tessera.ir.types import SYMBOLIC
from tessera.torch_internals.dispatch import disable_current_modes
from tessera.torch_internals.fake import FakeTensor
from tessera.util.errors import CaptureError

Number = bool | int | float | complex


@dataclass(frozen=True)
class Splat:
    number: Number
    shape: tuple[int, ...]
    element: Element

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.full(self.shape, self.number, dtype=self.element.held, device=device)


@dataclass(frozen=True, eq=False)
class Later:
    """A number that only a run tells, among sizes: what a tensor holds, plus a number. The end of a slice that begins
    at such a place is that far from its beginning."""

    tensor: torch.Tensor  # of no dimensions
    plus: int = 0

    def __add__(self, other: object) -> Later:
        return NotImplemented if isinstance(other, Later) else Later(self.tensor, self.plus + other)  # type: ignore[operator]

    __radd__ = __add__

    def __sub__(self, other: object) -> object:
        if isinstance(other, Later):
            return self.plus - other.plus if self.tensor is other.tensor else NotImplemented
        return Later(self.tensor, self.plus - other)  # type: ignore[operator]

    def clamp(self, low: object, high: object) -> Later:
        return Later(self.value().clamp(min=low).clamp(max=high))  # type: ignore[arg-type]

    def value(self) -> torch.Tensor:
        return self.tensor + self.plus


@dataclass(frozen=True)
class Sizes:
    array: np.ndarray  # of objects: int, SymInt, bool, SymBool, Later
    element: Element

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def tensor(self, device: torch.device) -> torch.Tensor:
        dtype = self.element.held
        if not any(isinstance(n, (*SYMBOLIC, Later)) for n in self.array.flat):
            return torch.tensor(self.array.tolist(), dtype=dtype, device=device).reshape(self.array.shape)
        numbers = [_scalar(n, dtype, device) for n in self.array.flat]
        return torch.stack(numbers).reshape(self.array.shape) if numbers else torch.empty(self.shape, dtype=dtype)


def _scalar(n: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return n.value().to(dtype) if isinstance(n, Later) else torch.scalar_tensor(n, dtype=dtype, device=device)  # type: ignore[arg-type]


Value = torch.Tensor | Splat | Sizes | tuple | None  # a tuple is one of StableHLO; None is a token


def is_fake(x: object) -> bool:
    return isinstance(x, FakeTensor)


def tensor_of(x: Value, device: torch.device) -> torch.Tensor:
    if isinstance(x, (Splat, Sizes)):
        return x.tensor(device)
    assert isinstance(x, torch.Tensor), f"expected a tensor, got {type(x).__name__}"
    return x


def contents(x: Value) -> np.ndarray | None:
    """The elements as Python numbers, if all are known now: not of a tensor that is being recorded."""
    known = elements_of(x)
    return None if known is None or any(isinstance(n, Later) for n in known.flat) else known


def elements_of(x: Value) -> np.ndarray | None:
    """As `contents`, with numbers among them that only a run tells (`Later`)."""
    if isinstance(x, Sizes):
        return x.array
    array: np.ndarray
    if isinstance(x, Splat):
        array = np.empty(x.shape, object)
        array.fill(x.number)
        return array
    if not isinstance(x, torch.Tensor) or is_fake(x):
        return None
    with disable_current_modes():
        array = np.empty(tuple(x.shape), object)
        array[...] = np.array(x.tolist(), object)
    return array


def integers(x: Value, what: str) -> list[int]:
    """Numbers that decide a shape. A tensor that is being recorded cannot tell: such a program is interpreted."""
    known = contents(x)
    if known is None:
        raise CaptureError(f"{what} depends on what a tensor holds, which only a run tells")
    return known.reshape(-1).tolist()


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(np.broadcast_shapes(*map(tuple, shapes)))
