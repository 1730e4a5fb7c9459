"""What does not fit, computed again.

In: a graph of which no mapping fits. Out: the same graph, in which values that wait for a reader far behind, where most
bytes wait, are computed a second time right before it; and what these are. A value is computed again from weights,
inputs and what is there for that reader anyway. What reads a state is not: another row may lie there by then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from tessera.spatial.graph import (
    Constant,
    Expression,
    Gather,
    Graph,
    Hosted,
    Input,
    Leave,
    Left,
    Node,
    Product,
    Scatter,
)
from tessera.spatial.maps import Home, Map

MOST = 8  # values that are computed again
DEEP = 4  # nodes that one of them takes


@dataclass(frozen=True)
class Again:
    """A value that is computed a second time for a reader."""

    value: Home
    reader: Home

    def __str__(self) -> str:
        return f"{self.value.name} ({self.value.nbytes:,} bytes) for {self.reader.name}"


def recomputed(graph: Graph) -> tuple[Graph, tuple[Again, ...]]:
    """Where most bytes wait, the largest value that can be computed again goes; until none is left there."""
    found: list[Again] = []
    while len(found) < MOST and (step := _Lives(graph).step()) is not None:
        graph, again = step
        found.append(again)
    if found:
        graph.live()  # what is read behind alone is not computed before
    return graph, tuple(found)


class _Lives:
    """From which node to which each value is there, if all nodes are computed in order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = {node.home: node for node in graph.nodes}
        self.reads: dict[Home, list[int]] = {}
        for i, node in enumerate(graph.nodes):
            for home in dict.fromkeys(home for m in node.maps for home in m.homes):
                self.reads.setdefault(home, []).append(i)
        self.first = {node.home: i for i, node in enumerate(graph.nodes)}
        for home, node in self.makers.items():
            if isinstance(node, Input | Hosted):  # it comes when somebody reads it
                self.first[home] = min(self.reads.get(home, [self.first[home]]))
        self.last = {home: max(self.reads.get(home, [at])) for home, at in self.first.items()}

    def peak(self) -> int:
        """The node at which most bytes are there."""
        changes = [0] * (len(self.graph.nodes) + 1)
        for home, node in self.makers.items():
            if not isinstance(node, Constant | Scatter | Left | Leave):
                changes[self.first[home]] += home.nbytes
                changes[self.last[home] + 1] -= home.nbytes
        there = list(itertools.accumulate(changes))
        return there.index(max(there))

    def step(self) -> tuple[Graph, Again] | None:
        peak = self.peak()
        waiting = [h for h, reads in self.reads.items() if self.first[h] < peak < reads[-1] and peak not in reads]
        for home in sorted(waiting, key=lambda home: home.nbytes, reverse=True):
            behind = next(i for i in self.reads[home] if i > peak)
            chain = self.chain(home, behind)
            kept = {h for node in chain for m in node.maps for h in m.homes if self.last[h] < behind}
            kept -= {node.home for node in chain} | {h for h in kept if isinstance(self.makers[h], Constant)}
            if chain and sum(h.nbytes for h in kept) < home.nbytes:
                return self.copied(chain, behind), Again(home, self.graph.nodes[behind].home)
        return None

    def chain(self, home: Home, behind: int) -> list[Node]:
        """The nodes that compute a value again, in order; none where it cannot be."""
        wanted, chain = [home], dict[Node, None]()
        while wanted:
            node = self.makers[wanted.pop()]
            if not isinstance(node, Product | Expression | Gather) or len(chain) == DEEP:
                return []
            chain[node] = None
            for m in node.maps:
                for h in m.homes:
                    maker = self.makers[h]
                    if isinstance(maker, Scatter | Left) or (isinstance(maker, Constant) and maker.state):
                        return []
                    if not isinstance(maker, Input | Constant | Hosted) and self.last[h] < behind:
                        wanted.append(h)
        if any(isinstance(self.graph.nodes[i], Hosted) for i in self.reads[home] if i >= behind):
            return []
        return sorted(chain, key=lambda node: self.first[node.home])

    def copied(self, chain: list[Node], behind: int) -> Graph:
        """The graph with copies of nodes before one, which it and all behind it read."""
        nodes = self.graph.nodes
        graph = replace(self.graph, homes=list(self.graph.homes), names=dict(self.graph.names))
        new: dict[Home, Home] = {}
        copies: list[Node] = []
        for node in chain:
            h = node.home
            copy = _reading(node, lambda m: _moved(m, new))
            new[h] = graph.home(f"{h.name}_again", h.dtype, h.rows, h.columns, h.source)
            copies.append(replace(copy, home=new[h], chip=nodes[behind].chip))
        later = [_reading(node, lambda m: _moved(m, new)) for node in nodes[behind:]]
        graph.nodes = [*nodes[:behind], *copies, *later]
        return graph


def _reading(node: Node, moved: Callable[[Map], Map]) -> Node:
    """A node with other maps."""
    match node:
        case Product():
            return replace(node, x=moved(node.x), w=moved(node.w))
        case Expression():
            return replace(node, operands=[moved(m) for m in node.operands])
        case Gather():
            return replace(node, table=moved(node.table), index=moved(node.index))
        case Scatter():
            return replace(node, index=moved(node.index), rows=moved(node.rows))
        case Leave():
            return replace(node, value=moved(node.value))
    return node


def _moved(m: Map, new: dict[Home, Home]) -> Map:
    if not any(p.home in new for p in m.pieces):
        return m
    return Map(m.shape, tuple(replace(p, home=new.get(p.home, p.home)) if p.home else p for p in m.pieces))
