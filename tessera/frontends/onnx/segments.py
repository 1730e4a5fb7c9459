"""A graph in parts: runs of nodes that become programs, and nodes between them that the interpreter runs.

In: a graph. Out: a `Plan`, a list of parts in the graph's order. It begins as one part that holds every node. Where a
node turns out not to become equations, its part is split there; where a node needs to know what a value holds, the
part ends before it, and the next begins by reading that value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.frontends.onnx.structure import Graph, Node, reads


@dataclass(eq=False)
class Part:
    nodes: tuple[Node, ...]
    reason: str = ""  # why the interpreter runs it; empty for a program
    inputs: tuple[str, ...] = ()  # names that it reads from before
    outputs: tuple[str, ...] = ()  # names that others read
    read: set[str] = field(default_factory=set)  # inputs whose values decide sizes
    entries: dict = field(default_factory=dict)  # compiled programs, by the types of their inputs
    programs: list = field(default_factory=list)  # those for any size


class Plan:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.parts = [Part(graph.nodes)] if graph.nodes else []
        self.connect()

    def connect(self) -> None:
        """Say of each part what it reads and what others read of it."""
        needed = {v.name for v in self.graph.outputs}
        for part in reversed(self.parts):
            defined = {name for node in part.nodes for name in node.outputs if name}
            part.outputs = tuple(dict.fromkeys(n for node in part.nodes for n in node.outputs if n and n in needed))
            inner = set().union(*(reads(node) for node in part.nodes)) - defined
            part.inputs = tuple(sorted(inner))
            needed = (needed - defined) | inner

    def cut(self, part: Part, node: Node) -> None:
        """A new part begins with this node."""
        place = part.nodes.index(node)
        self._replace(
            part, [Part(part.nodes[:place], read=set(part.read)), Part(part.nodes[place:], read=set(part.read))]
        )

    def interpret(self, part: Part, node: Node, reason: str) -> None:
        """The interpreter runs this node."""
        place = part.nodes.index(node)
        before, after = part.nodes[:place], part.nodes[place + 1 :]
        pieces = [Part(before, read=set(part.read)), Part((node,), reason), Part(after, read=set(part.read))]
        self._replace(part, pieces)

    def _replace(self, part: Part, pieces: Sequence[Part]) -> None:
        place = self.parts.index(part)
        self.parts[place : place + 1] = [p for p in pieces if p.nodes]
        self.connect()
        for p in self.parts:
            p.read &= set(p.inputs)
