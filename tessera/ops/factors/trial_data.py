"""Numbers on which an operator is tried before it is cut, chosen so that what looks across a cut is found out.

In: a tensor's type and the dimension along which it is to be cut. Out: a tensor of one of the kinds. An operator that
counts, ranks, normalises or compares along the cut agrees with its chunks by chance where every chunk holds much the
same, as few random numbers do. So chunks are made unlike: all of a mask in the first or the last of them, numbers that
rise from chunk to chunk, that are equal everywhere, of other scales, NaN or infinite in one. Integers are 0 and 1: as
counts they are unequal, as indices they say another row in each chunk but the first, and kernels that do not look
whether an index is in range are not led outside of what they were given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tessera.ir.types import TensorType

Kind = Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]]  # where along the cut: a mask, and numbers


def _normal(at: Tensor, draw: torch.Generator) -> Tensor:
    return torch.randn(at.shape, dtype=torch.float64, generator=draw)


def _coin(at: Tensor, draw: torch.Generator, share: float = 0.5) -> Tensor:
    return torch.rand(at.shape, generator=draw) < share


def _scaled(here: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return here, _normal(here, draw) * torch.where(here, 1e3, 1e-3)


def _all(at: Tensor, value: float) -> tuple[Tensor, Tensor]:
    return torch.full(at.shape, bool(value)), torch.full(at.shape, value, dtype=torch.float64)


def _tied(at: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return _coin(at, draw, 0.2), _coin(at, draw).double()


def _special(at: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
    picked = special[torch.randint(0, 3, at.shape, generator=draw)]
    return _coin(at, draw, 0.8), torch.where((at >= 2 / 3) & _coin(at, draw), picked, _normal(at, draw))


def _plain(at: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return _coin(at, draw), _normal(at, draw)


PLAIN: tuple[Kind, ...] = (_plain, _plain)
UNLIKE: tuple[Kind, ...] = (
    lambda at, draw: _scaled(at < 1 / 3, draw),
    lambda at, draw: _scaled(at >= 2 / 3, draw),
    lambda at, draw: (at < 1 / 2, -at),
    lambda at, draw: (at >= 1 / 2, at),
    lambda at, draw: _all(at, 0.0),
    lambda at, draw: _all(at, 1.0),
    _tied,
    _special,
    _plain,
    _plain,
)


def drawn(type_: TensorType, dim: int | None, kind: Kind, draw: torch.Generator) -> Tensor:
    """A tensor of a type; floats have 64 bits, so that a difference is one. What is not cut varies along itself."""
    shape = [int(n) for n in type_.shape]
    mask, numbers = kind(_places(shape, dim), draw)
    if type_.dtype == torch.bool:
        return mask
    if type_.dtype.is_complex:
        return torch.complex(numbers, kind(_places(shape, dim), draw)[1])
    return numbers if type_.dtype.is_floating_point else mask.to(type_.dtype)


def _places(shape: list[int], dim: int | None) -> Tensor:
    """How far along the cut an element lies, from 0 to 1; where there is no cut, among all elements."""
    if dim is None:
        count = max(1, torch.Size(shape).numel())
        return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) / count).reshape(shape)
    ramp = torch.arange(shape[dim], dtype=torch.float64) / shape[dim]
    return ramp.reshape([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape).contiguous()
