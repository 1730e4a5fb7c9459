"""Minimum cut of a directed graph with capacities (Dinic's algorithm).

In: `edges[a][b] = capacity`, a source and a sink. Out: the nodes still reachable from the source once the
maximum flow runs; the edges that leave this set are a minimum cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

INFINITE = float(2**62)


def min_cut(edges: dict[Hashable, dict[Hashable, float]], source: Hashable, sink: Hashable) -> set[Hashable]:
    index: dict[Hashable, int] = {}
    for a, targets in edges.items():
        index.setdefault(a, len(index))
        for b in targets:
            index.setdefault(b, len(index))
    if source not in index:
        return {source}
    s, t = index[source], index.setdefault(sink, len(index))
    heads: list[list[int]] = [[] for _ in index]  # arcs leaving a node
    to: list[int] = []
    left: list[float] = []
    for a, targets in edges.items():
        for b, capacity in targets.items():
            heads[index[a]].append(len(to))
            to.append(index[b])
            left.append(capacity)
            heads[index[b]].append(len(to))
            to.append(index[a])
            left.append(0.0)

    level = _levels(heads, to, left, s)
    while level[t] >= 0:
        _block(heads, to, left, level, s, t)
        level = _levels(heads, to, left, s)
    return {node for node, i in index.items() if level[i] >= 0}


def _levels(heads: list[list[int]], to: list[int], left: list[float], s: int) -> list[int]:
    level = [-1] * len(heads)
    level[s] = 0
    queue = deque([s])
    while queue:
        a = queue.popleft()
        for arc in heads[a]:
            if left[arc] > 0 and level[to[arc]] < 0:
                level[to[arc]] = level[a] + 1
                queue.append(to[arc])
    return level


def _block(heads: list[list[int]], to: list[int], left: list[float], level: list[int], s: int, t: int) -> None:
    """Saturate every shortest path."""
    at = [0] * len(heads)
    path: list[int] = []
    node = s
    while True:
        if node == t:
            flow = min(left[arc] for arc in path)
            for arc in path:
                left[arc] -= flow
                left[arc ^ 1] += flow
            stop = next(i for i, arc in enumerate(path) if left[arc] <= 0)
            node = to[path[stop] ^ 1]
            del path[stop:]
            continue
        while at[node] < len(heads[node]):
            arc = heads[node][at[node]]
            if left[arc] > 0 and level[to[arc]] == level[node] + 1:
                break
            at[node] += 1
        if at[node] < len(heads[node]):
            path.append(heads[node][at[node]])
            node = to[path[-1]]
        elif path:
            arc = path.pop()
            node = to[arc ^ 1]
            at[node] += 1
        else:
            return
