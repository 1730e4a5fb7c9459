"""Dtypes that a backend does not know, in exchanges.

In: tensors of any dtype. Out: exchanges of dtypes that gloo and NCCL know. What only moves is carried as another dtype
of as many bytes. What is added or compared is computed in one that holds all its values; whole numbers wrap around as
they do on one device, numbers of 8 bits are rounded once, and True and True are True. Backends read memory as it lies:
what is negated or conjugated as it is read is copied before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.ir.strides import resolved
from tessera.torch_internals.distributed import Group
from tessera.util.errors import InputError

KNOWN = frozenset(
    (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
)
AS_WIDE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}  # of so many bytes
SIGNS = {torch.uint32: torch.int32, torch.uint64: torch.int64}  # whose sums are the same bits


def moved(x: Tensor) -> Tensor:
    """The same memory, as numbers that a backend moves."""
    if x.dtype in KNOWN:
        return x
    wide = AS_WIDE.get(x.element_size())
    return torch.view_as_real(x).view(torch.float64) if wide is None else x.view(wide)


@dataclass(frozen=True)
class _Computed:
    """A dtype that sums are made in, there and back."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, torch.dtype], Tensor]
    how: str


def _flipped(x: Tensor) -> Tensor:
    """Whole numbers without a sign in the order of those with one, and back."""
    return x.view(torch.int64) ^ torch.iinfo(torch.int64).min


def _computed(dtype: torch.dtype, how: str) -> _Computed:
    as_it_was: Callable = lambda x, dtype: x.view(dtype)  # noqa: E731
    if dtype == torch.bool:
        return _Computed(lambda x: x.view(torch.uint8), as_it_was, {"sum": "max"}.get(how, how))
    if dtype.is_complex:
        if how != "sum":
            raise InputError(f"expected numbers with an order for the {how} over ranks, got {dtype}")
        return _Computed(torch.view_as_real, lambda x, _: torch.view_as_complex(x), how)
    if dtype in SIGNS and how == "sum":
        return _Computed(lambda x: x.view(SIGNS[dtype]), as_it_was, how)
    if dtype == torch.uint64:
        return _Computed(_flipped, lambda x, dtype: _flipped(x).view(dtype), how)
    wide = torch.float32 if dtype.is_floating_point else torch.int64 if dtype == torch.uint32 else torch.int32
    return _Computed(lambda x: x.to(wide), lambda x, dtype: x.to(dtype), how)


class Carrier(Group):
    """A group whose exchanges know all dtypes."""

    def all_gather(self, out: Tensor, x: Tensor) -> Any:
        return super().all_gather(moved(out), moved(resolved(x)))

    def all_to_all(self, out: Tensor, x: Tensor, take: list[int], give: list[int]) -> Any:
        return super().all_to_all(moved(out), moved(resolved(x)), take, give)

    def all_reduce(self, x: Tensor, how: str) -> Any:
        if (there := resolved(x)) is not x:
            return _Then(self.all_reduce(there, how), lambda: x.copy_(there))
        if x.dtype in KNOWN:
            return super().all_reduce(x, how)
        computed = _computed(x.dtype, how)
        there = computed.there(x).contiguous()
        return _Then(super().all_reduce(there, computed.how), lambda: x.copy_(computed.back(there, x.dtype)))

    def reduce_scatter(self, out: Tensor, x: Tensor, how: str = "sum") -> Any:
        x = resolved(x)
        if x.dtype in KNOWN:
            return super().reduce_scatter(out, x, how)
        computed = _computed(x.dtype, how)
        there = computed.there(x).contiguous()
        part = there.new_empty([out.shape[0], *there.shape[1:]])
        work = super().reduce_scatter(part, there, computed.how)
        return _Then(work, lambda: out.copy_(computed.back(part, x.dtype)))


@dataclass(frozen=True)
class _Then:
    """What is done when an exchange has ended."""

    work: Any
    do: Callable[[], object]

    def wait(self) -> None:
        self.work.wait()
        self.do()
