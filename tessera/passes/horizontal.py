"""Chooses regions that are one launch: alike in form, independent of one another.

In: a trace, regions of it, and the form of each (None: it stays alone). Out: lists of regions to run together, in the
order of the trace. Regions are taken together only as long as the whole can still be put into an order, and only until
a launch is long enough that its start no longer counts: waiting for more would only keep their arguments alive.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tessera.ir.equation import Value
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.depend import dependencies
from tessera.passes.fuse_graph import Groups

ENOUGH = 256 << 20  # bytes read and written by one launch
MOST = 1024  # regions in one launch


def horizontal(
    trace: Trace, regions: Sequence[Sequence[int]], forms: Sequence[Hashable | None], enough: int = ENOUGH
) -> list[list[int]]:
    """Lists of at least two numbers of regions, each list one launch."""
    groups = Groups(dependencies(trace))
    for region in regions:
        groups.join({groups.of[i] for i in region})
    waiting: dict[Hashable, list[int]] = {}
    found: list[list[int]] = []
    moved: dict[Hashable, int] = {}

    def close(key: Hashable) -> None:
        chosen = waiting.pop(key, [])
        moved.pop(key, None)
        if len(chosen) > 1:
            found.append(chosen)

    for number, key in enumerate(forms):
        if key is None:
            continue
        if key in waiting:
            both = [groups.of[regions[i][0]] for i in (waiting[key][0], number)]
            if _independent(groups, both):
                groups.join(both)
            else:
                close(key)
        waiting.setdefault(key, []).append(number)
        moved[key] = moved.get(key, 0) + _bytes(trace, regions[number])
        if moved[key] >= enough or len(waiting[key]) >= MOST:
            close(key)
    for key in list(waiting):
        close(key)
    return found


def _independent(groups: Groups, nodes: list[int]) -> bool:
    """No path leads from one to another."""
    mask = sum(1 << n for n in nodes)
    return not any(groups.above[n] & mask & ~(1 << n) for n in nodes) and groups.convex(nodes)


def _bytes(trace: Trace, region: Sequence[int]) -> int:
    values: dict[Value, None] = {}
    made = {v for i in region for v in trace.equations[i].results()}
    for i in region:
        values |= dict.fromkeys(v for v in trace.equations[i].inputs() if v not in made)
    total = sum(v.type.nbytes() for v in values if isinstance(v.type, TensorType))
    return 2 * total
