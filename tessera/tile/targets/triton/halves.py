"""The two kernels that one becomes, and their schedules: where many programs share a reduction or a sequential axis
(`split`), and where rows are too long to be held beside their sums (a sequential axis with `loop`): rows first, then
columns.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.tile.dialect.ops import PARALLEL, KernelOp
from tessera.tile.rewrites.copying import points
from tessera.tile.rewrites.split_kernel import PART, Split
from tessera.tile.rewrites.split_rows import split_rows
from tessera.tile.rewrites.split_sequential import split
from tessera.tile.schedules.schedule import Schedule, reduced_axis
from tessera.tile.targets.triton.unroll import LOADS_FIRST
from tessera.util.powers import power_of_two

ROW_BLOCK, ROW_WARPS = "row_block", "row_warps"  # what `extra` says of the rows where they come first
EARLY = ((LOADS_FIRST, True),)  # of a kernel that joins parts: it is as long as its loads are one after another


def in_two(kernel: KernelOp, schedule: Schedule) -> bool:
    return schedule.split > 1 or rows_first(kernel, schedule)


def rows_first(kernel: KernelOp, schedule: Schedule) -> bool:
    return kernel.sequential_axis is not None and schedule.loop


def halves(kernel: KernelOp, schedule: Schedule) -> Split:
    if rows_first(kernel, schedule):
        return split_rows(kernel)
    return split(kernel, schedule.split)


def schedules(kernel: KernelOp, schedule: Schedule, kernels: Split) -> tuple[Schedule, Schedule]:
    """The first kernel keeps the blocks; the second holds all parts of a few results in one block.

    Where the second runs along the axis too, its blocks are those of the first, each with all parts of its row.
    """
    if rows_first(kernel, schedule):
        return _of_long_rows(kernel, schedule)
    if kernel.sequential_axis is not None:
        return _of_sequential(kernel, schedule)
    parallel = kernel.axis_names(PARALLEL)
    first = replace(schedule, split=1, loop=True)
    parts = max(power_of_two(schedule.split), 2)
    axis = reduced_axis(kernel)
    if axis in kernels.second.axis_names():
        assert axis is not None
        return first, Schedule(((axis, schedule.block(axis)), (PART, parts)), warps=schedule.warps)
    total = points(kernel, parallel).constant
    rows = min(max(2048 // parts, 1), 128)
    if total is not None:
        rows = min(rows, power_of_two(max(total, 1)))
    blocks = ((" ".join(parallel), rows), (PART, parts)) if parallel else ((PART, parts),)
    return first, Schedule(blocks, warps=4, extra=EARLY)


def _of_sequential(kernel: KernelOp, schedule: Schedule) -> tuple[Schedule, Schedule]:
    """The first kernel as it is said; in the second, columns of the row of sums are the results."""
    axis = reduced_axis(kernel)
    assert axis is not None
    parts = max(power_of_two(schedule.split), 2)
    columns = max(min(8192 // parts, 64), 8)
    return replace(schedule, split=1), Schedule(
        ((axis, columns), (PART, parts)), warps=8 if parts >= 128 else 4, extra=EARLY
    )


def _of_long_rows(kernel: KernelOp, schedule: Schedule) -> tuple[Schedule, Schedule]:
    """The schedule is that of the columns; of the rows it says two numbers."""
    axis, extra = reduced_axis(kernel), dict(schedule.extra)
    assert axis is not None and kernel.sequential_axis is not None
    block, warps = extra[ROW_BLOCK], extra[ROW_WARPS]
    assert isinstance(block, int) and isinstance(warps, int)
    rows = Schedule(((kernel.sequential_axis, 1), (axis, block)), warps=warps, loop=True)
    return rows, replace(schedule, extra=tuple((k, v) for k, v in schedule.extra if k not in (ROW_BLOCK, ROW_WARPS)))
