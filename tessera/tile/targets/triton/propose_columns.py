"""Schedules for reductions down columns: the axis that is reduced is not the one that is contiguous in memory.

Programs take tiles of some columns, walk down a part of them, and leave the rest to a second kernel. What limits them
is how many bytes are on their way, and what a column's sum over many warps costs at the end: numbers here were measured
on an H200 (docs/performance.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.triton.shape import SECTOR, Shape, blocks_of, warps_for
from tessera.tile.targets.triton.unroll import BLOCKS
from tessera.util.powers import power_below, power_of_two

HANDFUL = 4  # elements reduced at each point of something large
SMALL = 1 << 20  # bytes that are read while a second kernel is launched
SHORT = 32  # elements of a column that a loop would reduce in one step
MANY_LOADS = 8  # of a tile, from which on a step is kept short


def columns(shape: Shape) -> Iterator[Schedule]:
    axis = shape.axis
    assert axis is not None
    size = max(shape.sizes[axis], 1)
    fast = max((a for a in shape.fast if a != axis), key=shape.fast.__getitem__)
    key = fast
    whole = max(power_of_two(size), 2)
    short = 64 if whole > HANDFUL else 512
    if shape.sizes[fast] < short and fast == shape.parallel[-1]:
        key = " ".join(shape.parallel)  # short rows: several of them side by side
    wide = min(power_of_two(shape.size(key)), 512 // shape.item // 2)
    others = shape.points // max(shape.size(key), 1)
    if whole <= HANDFUL:  # blocks as large as for elementwise work, which this nearly is
        wide = min(power_of_two(shape.size(key)), 2048 // whole)
        while wide > 32 and not shape.dynamic and others * math.ceil(shape.size(key) / wide) < shape.limits.programs:
            wide //= 2
        yield Schedule(blocks_of(key, wide, axis, whole), warps=warps_for(whole * wide, 32))
    small = whole <= SHORT or shape.points * size * shape.item < SMALL
    held = small or shape.exponentials or shape.tile_stores(axis, key)  # otherwise a loop reads once as well
    if held:
        yield from _whole_columns(shape, key, whole)
    yield from _walked(shape, key, wide)
    if not held:
        yield from _whole_columns(shape, key, whole)


def _whole_columns(shape: Shape, key: str, whole: int) -> Iterator[Schedule]:
    """All of the axis in one block. Many small programs: one that holds much alone waits for all of it."""
    assert shape.axis is not None
    few = max(2048 // whole, 32)
    for side in (few, 2 * few, few // 2):
        side = min(side, power_of_two(shape.size(key)))
        if whole * side <= 8192:
            yield Schedule(blocks_of(key, side, shape.axis, whole), warps=warps_for(whole * side, 64))


def _walked(shape: Shape, key: str, wide: int) -> Iterator[Schedule]:
    """Down the columns, in parts where programs are few."""
    axis = shape.axis
    assert axis is not None
    size, others = max(shape.sizes[axis], 1), shape.points // max(shape.size(key), 1)
    for walk in _walks(shape, key, wide):
        side = min(max(walk.columns, 16), power_of_two(shape.size(key)))
        each = min(walk.vectors * shape.vector, walk.most)
        step = max(walk.warps * 32 * each // side, 2)
        busy = max(others * shape.size(key) // side, 1)  # programs whose columns are all there
        most = min(shape.limits.units * walk.busy // walk.warps // busy, size // (2 * step))
        extra = ((BLOCKS, walk.blocks),) if walk.blocks > 1 else ()
        schedule = Schedule(blocks_of(key, side, axis, step), walk.warps, walk.stages, loop=True, extra=extra)
        if shape.ends and most >= 2:
            parts = _parts(shape, size, step, walk.blocks, most)
            yield replace(schedule, split=parts)
            if parts >= 4:
                yield replace(schedule, split=_parts(shape, size, step, walk.blocks, parts // 2))
        else:
            yield schedule


@dataclass(frozen=True)
class Walk:
    """How columns are walked down."""

    columns: int  # side by side
    warps: int
    stages: int = 2
    blocks: int = 1  # loaded in one step
    vectors: int = 1  # that a thread has of a block: what is carried from step to step takes as many registers
    busy: int = 16  # warps a multiprocessor, all programs together
    most: int = 64  # elements a thread has of a block at most, however narrow they are


def _walks(shape: Shape, key: str, wide: int) -> list[Walk]:
    """Bytes have to be on their way all the time: loads of several blocks at once while registers hold them, copies
    ahead where there are many loads, or stores between them."""
    assert shape.axis is not None
    loads = shape.tile_loads(shape.axis, key)
    if loads > MANY_LOADS:  # what they bring takes registers, and shared memory if copied ahead
        warps = [min(max(wide // each, 4), 32) for each in (16, 8)]
        return [*(Walk(wide, count, most=8) for count in warps), Walk(128, 8, 3)]
    if loads > 3:
        return [Walk(128, 8, 3), Walk(128, 8, 4), Walk(256, 8, 3), Walk(128, 8, 3, vectors=2)]
    if shape.tile_stores(shape.axis, key):  # fewer bytes a step: larger blocks
        warps = min(max(wide // 16, 4), 32)
        vectors = max(wide // warps // shape.vector, 1)
        large = [Walk(wide, warps, stages, vectors=vectors) for stages in (3, 2)]
        return [*large, Walk(wide, 8, 3, vectors=1), Walk(wide, 8, 2, blocks=2)]
    if loads > 1:
        return [
            Walk(64, 8, blocks=2, busy=32), Walk(128, 8, blocks=2, busy=32),
            Walk(128, 8, stages=3), Walk(128, 4, vectors=4),
        ]  # fmt: skip
    return [
        Walk(128, 8, blocks=4, busy=32), Walk(256, 8, blocks=4, busy=32),
        Walk(256, 8, stages=5, busy=32), Walk(wide, 8, vectors=4),
    ]  # fmt: skip


def _parts(shape: Shape, size: int, step: int, blocks: int, most: int) -> int:
    """Parts of a column, at most so many: with whole steps for each, if nearly as many parts have them, since a mask at
    every access costs more. Steps of fewer blocks are better than masks, too."""
    while not shape.dynamic and blocks:
        for parts in range(most, most * 2 // 3, -1):
            if size % (parts * step * blocks) == 0:
                return parts
        blocks //= 2
    return power_below(most)


def running_columns(shape: Shape) -> Iterator[Schedule]:
    """Running sums down columns. Every step waits for the one before it, so steps are few and long; side by side lie as
    many columns as one access to memory brings, or fewer where that leaves multiprocessors idle."""
    axis = shape.axis
    assert axis is not None
    key = max((a for a in shape.fast if a != axis), key=shape.fast.__getitem__)
    whole = max(power_of_two(max(shape.sizes[axis], 1)), 2)
    columns = min(max(SECTOR // shape.item, 1), power_of_two(shape.sizes[key]))
    while columns > 1 and not shape.dynamic and shape.points // columns < shape.limits.units:
        columns //= 2
    sizes = ((8192, 16), (4096, 16), (8192, 8), (4096, 8), (2048, 16), (16384, 16))
    if columns * whole > 8192:  # what a loop carries takes registers too
        sizes = ((4096, 8), (8192, 8), (4096, 16), (2048, 8))
    for elements, each in sizes:
        step = max(min(elements // columns, whole), 2)
        yield Schedule(blocks_of(key, columns, axis, step), warps=warps_for(columns * step, each), loop=step < whole)
