"""Schedules worth trying on a GPU, best first.

The kind of a kernel decides: elementwise work goes in flat blocks, or in square tiles where operands disagree on the
axis that is contiguous; rows are reduced by one program each, whole in registers while they fit; columns are reduced
in tiles whose long side is contiguous, or one by one where they carry running sums; products go in tiles for the
matrix units. Where too few programs would be left, the reduction is split. Everything follows from the kernel and the
sizes and the machine alone: the same every time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from xdsl.dialects.builtin import Float32Type

from tessera.machines import Machine
from tessera.tile.dialect.ops import ContractOp, KernelOp, LoadOp
from tessera.tile.dialect.types import axes_of, element_of
from tessera.tile.rewrites.split_rows import can_split_rows, split_rows
from tessera.tile.schedules.cost import axis_sizes
from tessera.tile.schedules.limits import Limits
from tessera.tile.schedules.schedule import Schedule, inner_axis, reduced_axis
from tessera.tile.targets.triton.fit import fitting
from tessera.tile.targets.triton.halves import ROW_BLOCK, ROW_WARPS
from tessera.tile.targets.triton.hazard import loop_hazard
from tessera.tile.targets.triton.propose_columns import columns, running_columns
from tessera.tile.targets.triton.shape import Shape, blocks_of, warps_for
from tessera.tile.targets.triton.tiles import bulks
from tessera.util.powers import power_below, power_of_two

AT_MOST = 8  # proposals: each is compiled where they are measured
STEPS = 32  # over rows, of a program that leaves sums over them for a second kernel: those of fewer cost too much


def propose(kernel: KernelOp, sizes: dict[str, int], machine: Machine) -> list[Schedule]:
    if inner_axis(kernel) is not None:
        return fitting(kernel, _attention(kernel, axis_sizes(kernel, sizes)), machine)
    limits = Limits(machine)
    shape = Shape(kernel, sizes, limits)
    if shape.axis is None:
        schedules = _elementwise(shape)
    elif kernel.sequential_axis is not None:
        schedules = (
            _sequential(shape, kernel.sequential_axis) if _short(shape) else _rows_then_columns(kernel, sizes, limits)
        )
    elif (sides := shape.product_sides()) is not None:
        schedules = _products(shape, *sides)
    elif shape.fast and max(shape.fast, key=shape.fast.__getitem__) != shape.axis:
        schedules = running_columns(shape) if shape.scans else columns(shape)
    else:
        schedules = _rows(shape)
    whole = loop_hazard(kernel)
    kept = fitting(kernel, [s for s in schedules if not (whole and s.loop)], machine)
    return list(dict.fromkeys(kept))[:AT_MOST]


# --- elementwise ---


def _elementwise(shape: Shape) -> Iterator[Schedule]:
    if not shape.parallel:
        yield Schedule((), warps=1)
        return
    fast = sorted(shape.fast, key=lambda a: (-shape.fast[a], shape.parallel.index(a)))
    if len(fast) >= 2:
        yield from _tiles(shape, *sorted(fast[:2], key=shape.parallel.index))
        return
    key = " ".join(shape.parallel)
    if fast and fast[0] != shape.parallel[-1] and shape.sizes[fast[0]] >= 256:
        key = fast[0]
    turns = ((4, 1), (4, 2), (8, 1), (8, 2), (4, 4))
    if fast and shape.has_row_values(fast[0]):
        key, turns = fast[0], ((8, 2), (4, 2), (8, 1), (4, 4), (4, 1))
    vector = shape.vector
    for warps, vectors in turns:
        block = warps * 32 * vector * vectors
        while block > 128 and not shape.dynamic and shape.points // block < shape.limits.units:
            block //= 2  # a program for every multiprocessor, if there are points for it
        yield Schedule(((key, block),), warps=min(warps, max(block // 32 // vector, 1)))


def _tiles(shape: Shape, first: str, second: str) -> Iterator[Schedule]:
    """Two contiguous axes: tiles that are read along one and written along the other."""
    sides = ((64, 64, 8), (32, 64, 4), (64, 32, 4), (32, 32, 4), (64, 128, 8), (128, 64, 8))
    if shape.item >= 4:
        sides = ((64, 64, 8), (64, 32, 4), (32, 64, 4), (32, 32, 4))
    for a, b, warps in sides:
        a, b = min(a, power_of_two(shape.sizes[first])), min(b, power_of_two(shape.sizes[second]))
        yield Schedule(((first, a), (second, b)), warps=min(warps, max(a * b // 128, 1)))


# --- reductions ---


def _rows(shape: Shape) -> Iterator[Schedule]:
    axis = shape.axis
    assert axis is not None
    size = max(shape.sizes[axis], 1)
    block = max(power_of_two(size), 2)
    key = " ".join(shape.parallel)
    limits = shape.limits
    few = shape.points * 4 < limits.programs and size >= limits.long_row
    if few and shape.splits:
        yield from _split_rows(shape, key, size)
    fills = size == limits.longer_row and shape.held * size == 4 * limits.registers
    if fills and shape.item >= 4:  # 8 warps have the most registers
        yield Schedule(blocks_of(key, 1, axis, block), warps=8)
    whole, looped = _whole_rows(shape, key, block), _looped_rows(shape, key, block)
    if (block >= limits.long_row) if shape.loops == 1 else _better_looped(shape, block, size):
        yield from looped
        yield from whole
    else:
        yield from whole
        yield from looped


def _better_looped(shape: Shape, block: int, size: int) -> bool:
    """Rows that registers do not hold, or that the second-level cache brings again while other programs work."""
    limits = shape.limits
    spills = shape.held * block > limits.held(32 if block > limits.long_row else 16)
    return spills or (block >= limits.longer_row and shape.again * size <= limits.cached_row)


def _whole_rows(shape: Shape, key: str, block: int) -> Iterator[Schedule]:
    """Rows in registers: read once, whatever is done with them."""
    assert shape.axis is not None
    if block > shape.limits.registers:
        return
    if (across := shape.across) is not None:
        yield from _turned_rows(shape, across, block)
    least = 1024 if shape.tile_stores(shape.axis, key) else 2048  # elements: programs that only read start too often
    rows = min(max(least // block, 1), power_of_two(max(shape.points // shape.limits.units, 1)))
    elements = rows * block
    for warps in dict.fromkeys(warps_for(elements, each) for each in (32, 16, 64, 8)):
        yield Schedule(blocks_of(key, rows, shape.axis, block), warps=warps)
    if rows > 1:
        yield Schedule(blocks_of(key, max(rows // 4, 1), shape.axis, block), warps=warps_for(elements // 4, 16))


def _turned_rows(shape: Shape, across: str, block: int) -> Iterator[Schedule]:
    """Whole rows, as many side by side as memory gives at once of a tensor that is contiguous across them."""
    assert shape.axis is not None
    for rows in (2 * shape.sector, shape.sector):
        rows = min(rows, power_of_two(shape.sizes[across]))
        if rows * block <= shape.limits.registers // 2:
            yield Schedule(blocks_of(across, rows, shape.axis, block), warps=warps_for(rows * block, 32))


def _looped_rows(shape: Shape, key: str, block: int) -> Iterator[Schedule]:
    """Loops along rows: each thread has 32 to 64 bytes on their way, and several programs share a multiprocessor.

    A row that is read again should still be in the second-level cache then, so that fewer and larger programs
    read the long ones.
    """
    assert shape.axis is not None
    cached, longer = shape.limits.cached_row, shape.limits.longer_row
    if shape.loops > 1 and block >= longer:
        steps = [(16384, 32), (16384, 16), (8192, 16), (4096, 8)]
        size = shape.sizes[shape.axis]
        again = shape.again * size
        if shape.again * 16384 > shape.limits.step and size % 16384:  # masks take registers too
            steps = [(8192, 16), (8192, 32), (4096, 8), (4096, 16)]
        elif shape.exponentials and again <= 2 * cached:  # two programs: one computes, one loads
            steps.insert(0, steps.pop(1))
        elif again > 2 * cached and shape.tile_loads(shape.axis, key) == 1 and size % longer == 0:
            steps.insert(0, (longer, 32))  # one program, or rows leave the cache
    elif shape.loops == 1 and shape.exponentials and shape.item < 4:
        steps = [(2048, 4), (4096, 8), (8192, 8), (8192, 16)]
    elif shape.loops > 1 or shape.exponentials:
        steps = [(4096, 8), (8192, 8), (8192, 16), (4096, 4)]
    elif shape.tile_loads(shape.axis, key) > 1:
        steps = [(2048, 8), (4096, 8), (8192, 8), (4096, 4)]
    else:
        steps = [(8192, 16), (8192, 8), (4096, 8), (4096, 4)]
    for step, warps in steps:
        if step < block:
            yield Schedule(blocks_of(key, 1, shape.axis, step), warps=warps, loop=True)


def _split_rows(shape: Shape, key: str, size: int) -> Iterator[Schedule]:
    assert shape.axis is not None
    enough = shape.limits.programs
    for step, warps, target in ((4096, 8, enough), (4096, 8, enough // 2), (2048, 4, enough)):
        parts = min(target // max(shape.points, 1), size // step, 1024)
        if parts >= 2:
            yield Schedule(blocks_of(key, 1, shape.axis, step), warps=warps, loop=True, split=power_below(parts))


def _short(shape: Shape) -> bool:
    """Rows whose sums fit into registers, and those that cannot be done otherwise."""
    assert shape.axis is not None
    return shape.sizes[shape.axis] <= shape.limits.carried_row or not can_split_rows(shape.kernel)


def _rows_then_columns(kernel: KernelOp, sizes: dict[str, int], limits: Limits) -> Iterator[Schedule]:
    """Long rows: what their reductions give first, then columns with their sums, each kernel as if it were alone."""
    halves = split_rows(kernel)
    rows, second = Shape(halves.first, sizes, limits), Shape(halves.second, sizes, limits)
    assert rows.axis is not None
    loop = next(s for s in _rows(rows) if s.loop and s.split == 1)
    extra = ((ROW_BLOCK, loop.block(rows.axis)), (ROW_WARPS, loop.warps))
    if any(a != second.axis for a in second.fast):
        yield from (replace(s, extra=(*extra, *s.extra)) for s in columns(second) if s.loop)
    else:  # rows whose neighbours in memory are other rows'
        assert second.axis is not None
        yield Schedule(blocks_of(rows.axis, 32, second.axis, 64), warps=4, loop=True, extra=extra)


def _sequential(shape: Shape, sequential: str) -> Iterator[Schedule]:
    """Whole rows, and sums over the rows carried in registers: some programs a multiprocessor, each with many rows."""
    axis, limits = shape.axis, shape.limits
    assert axis is not None
    block = max(power_of_two(max(shape.sizes[axis], 1)), 2)
    most = max(shape.sizes[sequential], 1)
    turns = [(16, 3, 1), (16, 1, 1), (16, 1, 2), (8, 3, 1), (8, 1, 1), (32, 3, 1), (16, 4, 1)]
    if shape.item >= 4 and block < 2048:
        turns.insert(0, turns.pop(3))
    elif block == 128:  # sums over several warps would cost more than the rows do
        turns.insert(0, turns.pop(5))
    for each, stages, more in turns:
        rows = min(max(1024 // block, 1), power_of_two(max(most // limits.units, 1)))
        warps = max(warps_for(rows * block, each), 1)
        # f32 is as fast with half the warps, and leaves fewer sums
        at_once = limits.busy_warps // (2 if shape.item >= 4 and block == 2048 else 1)
        programs = limits.units * max(at_once // warps, 1) * more
        parts = power_below(min(programs, most // rows))
        while not shape.dynamic and parts > limits.programs and most // rows < parts * STEPS:
            parts //= 2
        yield Schedule(blocks_of(sequential, rows, axis, block), warps=warps, stages=stages, split=parts)


# --- matrix products ---

# rows, columns, depth, warps, stages, how near to the best rate such tiles come
_NARROW = (
    (128, 256, 64, 8, 3, 1.0),
    (256, 128, 64, 8, 3, 0.98),
    (128, 128, 64, 8, 4, 0.9),
    (128, 128, 64, 4, 4, 0.88),
    (64, 256, 64, 4, 4, 0.8),
    (64, 128, 64, 4, 4, 0.72),
    (128, 64, 64, 4, 4, 0.72),
    (64, 64, 64, 4, 4, 0.5),
    (32, 128, 64, 4, 4, 0.35),
    (16, 128, 128, 4, 4, 0.25),
    (16, 64, 128, 4, 4, 0.2),
    (32, 32, 64, 2, 4, 0.2),
)
_WIDE = (
    (128, 128, 32, 8, 3, 1.0),
    (64, 128, 32, 4, 3, 0.9),
    (64, 64, 32, 4, 3, 0.75),
    (32, 64, 32, 4, 3, 0.5),
    (16, 64, 64, 4, 3, 0.3),
    (32, 32, 32, 2, 3, 0.3),
)


def _products(shape: Shape, rows: str, columns: str, wide: bool) -> list[Schedule]:
    assert shape.axis is not None
    tall, long, deep = shape.size(rows), shape.size(columns), shape.sizes[shape.axis]
    batch, units = shape.points // max(tall * long, 1), shape.limits.units
    ranked: list[tuple[float, int, Schedule]] = []
    several = sum(isinstance(op, ContractOp) for op in shape.kernel.block.ops)  # accumulators side by side
    for place, (a, b, d, warps, stages, rate) in enumerate(_WIDE if wide else _NARROW):
        a, b, d = (max(min(n, power_of_two(size)), 16) for n, size in ((a, tall), (b, long), (d, deep)))
        if several > 1 and a * b * several > shape.limits.registers // 2:
            continue
        tiles = batch * math.ceil(tall / a) * math.ceil(long / b)
        parts = 1
        if shape.ends and tiles * 2 <= units and deep >= 32 * d:
            parts = power_below(min(units // tiles, deep // (8 * d), 64))
        waves = math.ceil(tiles * parts / units)
        time = waves * a * b / rate / parts + (0.05 * a * b if parts > 1 else 0)
        blocks = ((rows, a), (columns, b), (shape.axis, d))
        warps = min(warps, 4) if a * b < 8192 else warps
        schedule = Schedule(blocks, warps=warps, stages=stages, loop=True, group=8, split=parts)
        ranked.append((time, place, schedule if wide or parts > 1 else _by_tiles(shape, schedule, a * b)))
    return [schedule for _, _, schedule in sorted(ranked, key=lambda r: r[:2])]


def _by_tiles(shape: Shape, schedule: Schedule, elements: int) -> Schedule:
    """The same tiles for persistent programs, where both operands come by bulk copies."""
    kernel = shape.kernel
    if not shape.limits.machine.copies_in_bulk:
        return schedule
    # Of the epilogue: where the accumulator takes half of the registers, few are left beside it.
    pieces = 2 if elements >= shape.limits.registers // 2 else 1
    extra = (("bulk", True), ("parts", pieces), ("flatten", True))
    persistent = replace(schedule, persistent=True, group=16, extra=extra)
    copied = [
        op for op in bulks(kernel, persistent) if isinstance(op, LoadOp) and reduced_axis(kernel) in axes_of(op.result)
    ]
    operands = {v for op in kernel.block.ops if isinstance(op, ContractOp) for v in (op.lhs, op.rhs)}
    return persistent if len(copied) >= len(operands) else schedule


# --- attention ---

# rows, keys a step, warps, stages
_MANY_ROWS = ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 4, 3))
_FEW_ROWS = ((16, 64, 4, 3), (16, 128, 4, 3), (16, 64, 2, 4), (16, 32, 4, 4))
_FEW_WIDE_ROWS = ((16, 32, 4, 2), (16, 32, 4, 3), (16, 64, 8, 2))  # f32: with more keys a step, four warps spill


def _attention(kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
    """Rows that fill the matrix units, and enough keys a step to hide their way; a result is whole in one block."""
    axis = reduced_axis(kernel)
    assert axis is not None
    last = next(op for op in kernel.block.ops if isinstance(op, ContractOp) and op.axis.data == axis)
    rows, columns = ([a for a in axes_of(v) if a != axis] for v in (last.lhs, last.rhs))
    row = next(a for a in reversed(rows) if a not in columns)
    wide = max(power_of_two(sizes[columns[-1]]), 16)
    schedules = []
    few = _FEW_WIDE_ROWS if isinstance(element_of(last.rhs), Float32Type) else _FEW_ROWS
    for tall, step, warps, stages in _MANY_ROWS if sizes[row] > 32 else few:
        step = step if wide <= 128 else max(step // 2, 16)
        schedules.append(Schedule(((row, tall), (columns[-1], wide), (axis, step)), warps, stages, loop=True))
    return schedules
