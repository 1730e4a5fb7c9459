"""Schedules on the CPU: which axis lanes lie along, how many at a time, how large a task is.

A Schedule made for this target names them in `extra` ("vector", "lanes"); `blocks` holds the vector axis's share of a
task. Anything a schedule leaves open, or that does not fit the kernel, is chosen here, so that any Schedule runs.
"""

from __future__ import annotations

import math

from tessera.tile.dialect.ops import ApplyOp, KernelOp, RandomOp, StoreOp
from tessera.tile.dialect.types import element_of
from tessera.tile.rewrites.split_reduction import can_split, ends_all
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.cpu.choice import Choice
from tessera.tile.targets.cpu.elements import element
from tessera.tile.targets.cpu.host import Host
from tessera.tile.targets.cpu.layout import Layout, cost, layout, numbers, piece_of, vector_axis
from tessera.tile.targets.cpu.product import COLUMNS, SIDE, product_of
from tessera.tile.targets.cpu.transpose import tile_axis
from tessera.util.powers import power_below

HEAVY = 24  # instructions a point above which fewer lanes are handled at once, for want of registers
TASK = 4096  # points of one task, where a task is part of the vector axis
PART_POINTS = 1 << 15  # of one part of a reduction that is shared out: some microseconds of work
MOST_PARTS = 64  # whatever the number of cores is: results do not depend on that
LEAST_ROWS = 8  # of one part of a sequential axis: its sums are written and read once more
FEW_ROWS = 4  # fewer leave threads without work; a row that is read again in a second kernel should be alone


def choose(seen: Layout, schedule: Schedule, host: Host) -> Choice:
    if (product := product_of(seen, host)) is not None:
        return Choice(product.columns, SIDE, product.block, COLUMNS, product.rows, product)
    extra = dict(schedule.extra)
    sizes = numbers(seen, {})
    native = _native(seen.kernel, host)
    vector = extra.get("vector", "") or vector_axis(seen, sizes, native)
    if vector not in seen.sizes or seen.sequential is not None:
        vector = vector_axis(seen, sizes, native)
    lanes = int(extra.get("lanes", 0) or native * _unroll(seen))  # type: ignore[call-overload]
    if vector is None:
        return Choice(None, 0, 0, 1)
    assert isinstance(vector, str)
    lanes = max(power_below(lanes), native)
    size = seen.sizes[vector].constant
    while size is not None and lanes > native and lanes > size:
        lanes //= 2
    while size is not None and native > 2 and native >= 2 * size:
        native //= 2
        lanes = max(native, lanes // 2)
    tile = tile_axis(seen, vector, native)
    lanes = native if tile is not None else lanes
    piece = piece_of(seen, lanes, native) if vector == seen.reduced and tile is None else 0
    while piece and lanes > max(piece, native):
        lanes //= 2
    block = schedule.block(vector)
    block = _task(seen, sizes, lanes) if block < lanes else block
    return Choice(vector, lanes, native, (block + lanes - 1) // lanes * lanes, tile, piece=piece)


def proposals(kernel: KernelOp, sizes: dict[str, int], host: Host) -> list[Schedule]:
    """Best guess first, then with more and fewer lanes at once."""
    seen = layout(kernel)
    if (product := product_of(seen, host)) is not None:  # which leaves nothing open
        return [Schedule(extra=(("vector", product.columns), ("lanes", SIDE)))]
    extents = numbers(seen, sizes)
    native = _native(kernel, host)
    vector = vector_axis(seen, extents, native)
    parts = _parts(seen, extents, bool(kernel.symbol_names))
    if vector is None:
        return [Schedule(extra=(("vector", ""), ("lanes", 0)))]
    guess = native * _unroll(seen)
    tried: list[Schedule] = []
    for lanes in (guess, guess * 2, guess // 2, native):
        lanes = max(lanes, native)
        blocks = () if vector == seen.reduced else ((vector, _task(seen, extents, lanes)),)
        candidate = Schedule(blocks=blocks, split=parts, extra=(("vector", vector), ("lanes", lanes)))
        if candidate not in tried:
            tried.append(candidate)
    return tried


def _task(seen: Layout, sizes: dict[str, int], lanes: int) -> int:
    """The vector axis's share of a task: enough to be worth one, and no more, so that threads have tasks to share."""
    deep = 1 if seen.reduced is None else sizes.get(seen.reduced, 256)
    return max(TASK // max(deep, 1) // lanes, 1) * lanes


def _parts(seen: Layout, sizes: dict[str, int], dynamic: bool) -> int:
    """Into how many parts a sequential axis, or the reduction of everything to a few numbers, is shared out; or 1."""
    if seen.reduced is None or sizes.keys() != seen.sizes.keys():
        return 1
    points, long = math.prod(sizes.values()), sizes[seen.reduced]
    rows = points // max(long, 1)
    if seen.sequential is not None:
        return _even(sizes[seen.sequential], min(points // PART_POINTS, sizes[seen.sequential] // LEAST_ROWS), dynamic)
    if rows >= (FEW_ROWS if ends_all(seen.kernel) else 2) or not can_split(seen.kernel):
        return 1
    return _even(long, points // PART_POINTS, dynamic)


def _even(size: int, most: int, dynamic: bool) -> int:
    """A number of parts up to `most` that leaves no rest, if there is one that is not much smaller."""
    most = min(most, MOST_PARTS)
    if dynamic:
        return max(most, 1)
    exact = next((n for n in range(most, most // 4, -1) if size % n == 0), 0)
    return max(exact or most, 1)


def _native(kernel: KernelOp, host: Host) -> int:
    """Lanes of one register, by the widest elements that arithmetic runs on."""
    wide = any(
        isinstance(op, RandomOp)
        or (isinstance(op, ApplyOp) and element(element_of(op.result)).register in ("double", "i64"))
        for op in kernel.block.ops
    )
    return host.width // (8 if wide else 4)


def _unroll(seen: Layout) -> int:
    if any(isinstance(op, StoreOp) and op.mode.data == "add" for op in seen.kernel.block.ops):
        return 1
    return 2 if cost(seen.kernel) > HEAVY else 4
