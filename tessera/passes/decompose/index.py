"""Writes at indices turned into reads, which kernels can hold.

A one-hot code compares a class with every class. Slices copied to places that indices name are read from there: a small
vector, written by the library, says which slice of the source lies at each place, and a kernel gathers them. So nothing
is copied before it is written, nothing is cleared first, and what computes the source or reads the result can be in
the same kernel. Of several slices copied to one place one stays, as in PyTorch, whole.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.types import size_hint
from tessera.ops.copies import FILLS
from tessera.passes.decompose.nn import Results, rule

LONG = 64  # elements of a slice from which it is worth an index of its own
BETWEEN = (torch.ops.aten.index_copy.default,)  # the library's part, between kernels


@rule("one_hot")
def one_hot(eqn: Equation, index: Value, classes: int = -1) -> Results:
    """A class that there is not has a row of zeros; on a CPU PyTorch raises there, and keeps it."""
    if index.tensor.device.type == "cpu" or (isinstance(classes, int) and classes < 1):
        return None
    every = aten.arange(classes, device=index.tensor.device)
    return [aten._to_copy(aten.eq(aten.unsqueeze(index, -1), every), dtype=torch.int64)]


def index_copy(
    makers: dict[Value, Equation], eqn: Equation, x: Value, dim: int, index: Value, source: Value
) -> Results:
    """Into something that is filled for it; a few slices of what was there before are better written in place."""
    if not made_by(makers, x, FILLS):
        return None
    if index.ndim != 1 or x.ndim < 2 or source.ndim != x.ndim:
        return None
    dim = dim % x.ndim
    count = x.shape[dim]
    if x.tensor.numel() < LONG * size_hint(count):
        return None
    numbers = aten.arange(index.shape[0], device=index.tensor.device)
    nobody = aten.full([count], -1, dtype=torch.int64, device=index.tensor.device)
    which = aten.index_copy(nobody, 0, index, numbers)
    slices = aten.index_select(source, dim, aten.clamp(which, 0))
    written = aten.view(aten.ge(which, 0), [-1 if d == dim else 1 for d in range(x.ndim)])
    return [aten.where(written, slices, x)]


def made_by(makers: dict[Value, Equation], x: Value, names: Collection[str]) -> bool:
    """Does one of these operators make a value, wherever it was detached since?"""
    maker = makers.get(x)
    while maker is not None and maker.opname == "detach":
        maker = makers.get(maker.inputs()[0])
    return maker is not None and maker.opname in names


WITH_MAKERS = {"index_copy": index_copy}
