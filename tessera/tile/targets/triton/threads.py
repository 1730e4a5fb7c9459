"""How the threads of a program share a block, as Triton lays it out: by what neighbours in memory are."""

from __future__ import annotations

import math

from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.ops import KernelOp, LoadOp
from tessera.tile.dialect.types import axes_of, element_of
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.triton.layout import Dim


def runs_down(kernel: KernelOp, schedule: Schedule, dim: Dim, beside: Dim) -> bool:
    """Whether the dim runs down many columns that lie side by side, of which warps share each; the exchange takes
    registers, which larger blocks have not."""
    loads = [op for op in kernel.block.ops if isinstance(op, LoadOp) and dim.axes[0] in axes_of(op.result)]
    steps = [op.at.expr.stride(dim.axes[0]) for op in loads]
    many = dim.block >= 4 and beside.block >= 32 and dim.block * beside.block <= schedule.warps * 32 * 8
    return many and bool(steps) and not any(s is not None and s.constant == 1 for s in steps)


def lanes_of(kernel: KernelOp, schedule: Schedule, dim: Dim, shape: tuple[int, ...]) -> tuple[int, int]:
    """How many threads share a row of the block, and how many neighbours each loads at once."""
    axis = dim.axes[0]
    loads = [op for op in kernel.block.ops if isinstance(op, LoadOp) and axis in axes_of(op.result)]
    steps = [op.at.expr.stride(axis) for op in loads]
    if not any(s is not None and s.constant == 1 for s in steps):
        return 1, dim.block
    narrowest = min(torch_dtype(element_of(op.result)).itemsize for op in loads)
    vector = min(16 // narrowest, dim.block)
    rows = math.prod(shape) // dim.block
    return max(min(schedule.warps * 32 // rows, dim.block // vector), 1), vector
