"""How far a kernel reaches into its buffers.

In: a kernel and values of its symbols. Out: for every buffer the smallest and largest element that some access surely
touches. Only accesses whose offset is a sum of axes times factors tell that exactly; those under a mask, at gathered
places or with divisions are left out. Who hands tensors to a kernel checks them against this; the kernel does not.
"""

from __future__ import annotations

from collections.abc import Mapping

from tessera.tile.dialect.index import Index, Name
from tessera.tile.dialect.ops import KernelOp, LoadOp, StoreOp


def reach(kernel: KernelOp, symbols: Mapping[str, int]) -> dict[int, tuple[int, int]]:
    """The first and last element, by the number of a buffer; buffers of which nothing is sure are not there."""
    ends: dict[str, int] = {}  # the last position of every axis
    for axis in kernel.axes:
        ends[axis.axis.data] = axis.size.expr.evaluate(symbols.__getitem__, int) - 1
    if any(end < 0 for end in ends.values()):
        return {}
    numbers = {b: i for i, b in enumerate(kernel.buffers)}
    ranges: dict[int, tuple[int, int]] = {}
    for op in kernel.block.ops:
        if not isinstance(op, (LoadOp, StoreOp)) or op.mask is not None or op.indices:
            continue
        touched = _range(op.at.expr, ends, symbols)
        if touched is not None:
            low, high = ranges.get(numbers[op.buffer], touched)
            ranges[numbers[op.buffer]] = min(low, touched[0]), max(high, touched[1])
    return ranges


def _range(expr: Index, ends: Mapping[str, int], symbols: Mapping[str, int]) -> tuple[int, int] | None:
    """The least and greatest value of a sum in which every axis has one factor; None where it is no such sum."""
    factors: dict[str, int] = {}
    start = 0
    for product, factor in expr.terms:
        axis = ""
        for atom in product:
            if not isinstance(atom, Name) or (atom.name in ends and axis):
                return None
            if atom.name in ends:
                axis = atom.name
            else:
                factor *= symbols[atom.name]
        if axis:
            factors[axis] = factors.get(axis, 0) + factor
        else:
            start += factor
    steps = [factor * ends[axis] for axis, factor in factors.items()]
    return start + sum(min(s, 0) for s in steps), start + sum(max(s, 0) for s in steps)
