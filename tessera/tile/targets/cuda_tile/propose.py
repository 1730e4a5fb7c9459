"""Schedules worth trying with cuTile, best first, and those of the two kernels that one becomes when it is split.

Tiles are held in registers, so that their sizes decide: a row is whole while it fits and looped over otherwise, a
product's accumulator is at most 128 by 128. Few long rows are shared out. The same comes out every time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tessera.tile.dialect.ops import PARALLEL, REDUCE, ContractOp, KernelOp, LoadOp, ScanOp, StoreOp
from tessera.tile.dialect.types import axes_of
from tessera.tile.rewrites.flash import flash_of
from tessera.tile.rewrites.split_kernel import PART
from tessera.tile.rewrites.split_reduction import can_split
from tessera.tile.schedules.cost import axis_sizes
from tessera.tile.schedules.limits import Limits
from tessera.tile.schedules.schedule import Schedule, inner_axis, reduced_axis
from tessera.tile.targets.cuda_tile.emit import SMALLEST
from tessera.util.powers import power_below, power_of_two


def propose(kernel: KernelOp, sizes: dict[str, int], limits: Limits) -> list[Schedule]:
    extent = axis_sizes(kernel, sizes)
    if inner_axis(kernel) is not None:
        schedules = _attention(kernel, extent)
    elif any(isinstance(op, ContractOp) for op in kernel.block.ops):
        schedules = list(_products(kernel, extent, limits))
    elif kernel.sequential_axis is not None:
        schedules = list(_sequential(kernel, kernel.sequential_axis, extent, limits))
    elif reduced_axis(kernel) is not None:
        schedules = list(_reductions(kernel, extent, limits))
    else:
        schedules = [_pointwise(kernel, extent, elements) for elements in (1024, 2048, 4096)]
    return list(dict.fromkeys(schedules))


def _contiguous(kernel: KernelOp) -> str | None:
    """The axis along which the accesses of most axes go element by element; the reduced one where two tie."""
    accesses = [op for op in kernel.block.ops if isinstance(op, (LoadOp, StoreOp))]
    known = set(kernel.axis_names())
    rank = max((len(op.at.expr.names() & known) for op in accesses), default=0)
    counts: dict[str, int] = {}
    for op in accesses:
        for a in kernel.axis_names():
            stride = op.at.expr.stride(a)
            if len(op.at.expr.names() & known) == rank and stride is not None and stride.constant == 1:
                counts[a] = counts.get(a, 0) + 1
    return max(counts, key=lambda a: (counts[a], kernel.axis(a).kind.data == REDUCE)) if counts else None


def _pointwise(kernel: KernelOp, extent: Mapping[str, int], elements: int) -> Schedule:
    """Blocks of `elements`: the contiguous axis first, then its neighbours, innermost first."""
    first = _contiguous(kernel)
    order = sorted(kernel.axis_names(), key=lambda a: (a != first, -kernel.axis_names().index(a)))
    return Schedule(blocks=_fill(order, extent, elements))


def _fill(order: Sequence[str], extent: Mapping[str, int], elements: int) -> tuple[tuple[str, int], ...]:
    blocks: list[tuple[str, int]] = []
    for a in order:
        block = min(power_of_two(extent[a]), elements)
        if block > 1:
            blocks.append((a, block))
        elements //= block
    return tuple(blocks)


MOST_PARTS = 256  # of a row: one block holds all of them when they are joined


def whole_row(limits: Limits) -> int:
    """Elements that one program holds of a row without a loop; cuTile keeps whole tiles in registers."""
    return limits.registers // 8


def longest_summed_row(limits: Limits) -> int:
    """Elements of a row whose sums over all rows are carried beside it."""
    return limits.registers // 16


def _reductions(kernel: KernelOp, extent: Mapping[str, int], limits: Limits) -> list[Schedule]:
    axis = reduced_axis(kernel)
    assert axis is not None
    first = _contiguous(kernel)
    parallel = [a for a in reversed(kernel.axis_names(PARALLEL))]
    if first is not None and first != axis and any(isinstance(op, ScanOp) for op in kernel.block.ops):
        # running sums down columns: steps wait for one another, so few and long ones
        steps = dict.fromkeys(min(power_of_two(extent[axis]), step) for step in (4096, 2048, 1024))
        return [Schedule(blocks=((axis, step),), loop=step < extent[axis]) for step in steps]
    if first is not None and first != axis:  # columns: many of them side by side, the axis in a loop
        wide = min(power_of_two(extent[first]), 128)
        return [
            Schedule(blocks=((first, wide), (axis, depth)), loop=True)
            for depth in (32, 64, 16)
            if depth <= power_of_two(extent[axis]) or depth == 16
        ]
    row = power_of_two(extent[axis])
    schedules = list(_split_rows(kernel, axis, extent, limits))
    if row <= whole_row(limits):
        for elements in (1024, 4096, row):
            rows = _fill(parallel, extent, max(elements // row, 1))
            schedules.append(Schedule(blocks=(*rows, (axis, row))))
    schedules += [Schedule(blocks=((axis, block),), loop=True) for block in (4096, 2048, 1024) if block <= row]
    return schedules


def _split_rows(kernel: KernelOp, axis: str, extent: Mapping[str, int], limits: Limits) -> Iterator[Schedule]:
    """Few long rows, each shared by several programs."""
    rows = math.prod(extent[a] for a in kernel.axis_names(PARALLEL))
    if rows * 4 >= limits.programs or extent[axis] < 2 * whole_row(limits) or not can_split(kernel):
        return
    for block in (4096, 2048):
        parts = min(limits.programs // max(rows, 1), extent[axis] // block, MOST_PARTS)
        if parts >= 2:
            yield Schedule(((axis, block),), loop=True, split=power_below(parts))


def _sequential(kernel: KernelOp, sequential: str, extent: Mapping[str, int], limits: Limits) -> Iterator[Schedule]:
    """Whole rows, and sums over the rows carried in registers: a few programs a multiprocessor, each with many rows."""
    axis = reduced_axis(kernel)
    assert axis is not None
    row = power_of_two(extent[axis])
    for elements, each in ((2048, 2), (4096, 2), (1024, 4), (2048, 4)):
        rows = max(min(elements // row, power_of_two(max(extent[sequential] // limits.units, 1))), 1)
        parts = max(min(each * limits.units, extent[sequential] // rows), 1)
        blocks = ((sequential, rows), (axis, row)) if rows > 1 else ((axis, row),)
        yield Schedule(blocks, split=power_below(parts))


def of_halves(kernel: KernelOp, schedule: Schedule, second: KernelOp) -> tuple[Schedule, Schedule]:
    """The first kernel keeps the blocks; the second holds all parts of its results in one block."""
    axis = reduced_axis(kernel)
    assert axis is not None
    parts = power_of_two(schedule.split)
    if kernel.sequential_axis is not None:  # columns of the row of sums are the results
        return replace(schedule, split=1), Schedule(((axis, max(min(4096 // parts, 64), 8)), (PART, parts)))
    if axis in second.axis_names():  # every point along the axis once more, each block with all parts of its row
        return replace(schedule, split=1), Schedule(((axis, min(schedule.block(axis), 2048)), (PART, parts)))
    known = {a: kernel.axis(a).size.expr.constant for a in reversed(kernel.axis_names(PARALLEL))}
    extent = {a: parts if n is None else n for a, n in known.items()}
    return replace(schedule, split=1), Schedule((*_fill(list(extent), extent, max(2048 // parts, 1)), (PART, parts)))


# Rows, columns, depth. Accumulators that take more than a quarter of the registers spill to local memory.
TILES = ((128, 128, 64), (128, 64, 64), (64, 128, 64), (64, 64, 64), (128, 128, 32), (64, 64, 32), (32, 32, 32))


def _products(kernel: KernelOp, extent: Mapping[str, int], limits: Limits) -> list[Schedule]:
    products = [op for op in kernel.block.ops if isinstance(op, ContractOp)]
    op = products[0]
    lhs, rhs = (set(v.type.axis_names) for v in (op.lhs, op.rhs))  # type: ignore[attr-defined]
    depth = op.axis.data
    rows = [a for a in kernel.axis_names() if a in lhs - rhs]
    columns = [a for a in kernel.axis_names() if a in rhs - lhs]
    schedules: list[Schedule] = []
    for m, n, k in TILES:
        if len(products) > 1 and m * n * len(products) > limits.registers // 4:  # accumulators side by side
            continue
        blocks = [(depth, min(k, max(power_of_two(extent[depth]), 16)))]
        for group, size in ((rows, m), (columns, n)):
            if group:
                longest = max(group, key=lambda a: extent[a])
                blocks.append((longest, min(size, max(power_of_two(extent[longest]), 16))))
        schedules.append(Schedule(blocks=tuple(blocks), loop=True, group=8))
    return schedules


# Rows, keys a step.
MANY_ROWS = ((128, 64), (64, 64), (64, 32), (32, 64))
FEW_ROWS = ((16, 64), (16, 128), (16, 32))


def _attention(kernel: KernelOp, extent: Mapping[str, int]) -> list[Schedule]:
    """Rows that fill the matrix units; a result is whole in one block, so that scores are made once."""
    parts = flash_of(kernel)
    axis = parts.result.axis.data
    rows, columns = ([a for a in axes_of(v) if a != axis] for v in (parts.result.lhs, parts.result.rhs))
    row = next(a for a in reversed(rows) if a not in columns)
    wide = max(power_of_two(extent[columns[-1]]), SMALLEST)
    return [
        Schedule(((row, tall), (columns[-1], wide), (axis, step)), loop=True)
        for tall, step in (MANY_ROWS if extent[row] > 32 else FEW_ROWS)
    ]
