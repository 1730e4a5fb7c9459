"""Chooses regions that are one launch: alike in form, independent of one another.

In: a trace, regions of it, and the form of each (None: it stays alone). Out: lists of regions to run together, in the
order of the trace. Regions are taken together only as long as the whole can still be put into an order. A region that
moves many bytes gains nothing and runs as soon as it can; a launch is closed once it is long enough that its start no
longer counts, or once its results would hold much memory that a region alone would have taken later.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tessera.ir.equation import Value
from tessera.ir.trace import Trace
from tessera.passes.fuse.graph import Groups
from tessera.passes.memory.depend import dependencies

MANY = 64 << 20  # bytes read and written by a region that runs alone
ENOUGH = 256 << 20  # bytes read and written by one launch
HELD = 16 << 20  # bytes of its results that are not the new contents of an input
MOST = 1024  # regions in one launch


def horizontal(trace: Trace, regions: Sequence[Sequence[int]], forms: Sequence[Hashable | None]) -> list[list[int]]:
    """Lists of at least two numbers of regions, each list one launch."""
    written = set(trace.mutations.values())
    groups = Groups(dependencies(trace))
    for region in regions:
        groups.join({groups.of[i] for i in region})
    waiting: dict[Hashable, list[int]] = {}
    launches: list[list[int]] = []
    moved: dict[Hashable, int] = {}
    held: dict[Hashable, int] = {}

    def close(key: Hashable) -> None:
        chosen = waiting.pop(key, [])
        moved.pop(key, None)
        held.pop(key, None)
        if len(chosen) > 1:
            launches.append(chosen)

    for number, key in enumerate(forms):
        move, hold = _bytes(trace, regions[number], written)
        if key is None or move >= MANY:
            continue
        if key in waiting:
            both = [groups.of[regions[i][0]] for i in (waiting[key][0], number)]
            if groups.independent(both):
                groups.join(both)
            else:
                close(key)
        waiting.setdefault(key, []).append(number)
        moved[key] = moved.get(key, 0) + move
        held[key] = held.get(key, 0) + hold
        if moved[key] >= ENOUGH or held[key] >= HELD or len(waiting[key]) >= MOST:
            close(key)
    for key in list(waiting):
        close(key)
    return launches


def _bytes(trace: Trace, region: Sequence[int], written: set[Value]) -> tuple[int, int]:
    """Roughly what a region reads and writes, and what of it is fresh memory: at most its last result."""
    inside = {v for i in region for v in trace.equations[i].results()}
    reads = {v for i in region for v in trace.equations[i].inputs() if v not in inside}
    last = trace.equations[region[-1]].results()
    results = [v for v in inside if v in written] or last
    fresh = sum(v.nbytes() for v in last if v not in written)
    return sum(v.nbytes() for v in (*reads, *results)), fresh
