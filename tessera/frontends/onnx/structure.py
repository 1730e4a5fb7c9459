"""An ONNX model as read: graphs, nodes and functions whose every reference has been checked.

The messages of the file are gone; nothing here is changed after reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Key = tuple[str, str, str]  # domain, name, overload


@dataclass(frozen=True)
class Reference:
    """An attribute inside a function whose value the caller's attribute of this name is."""

    name: str


@dataclass(frozen=True)
class ValueInfo:
    name: str
    kind: str = "tensor"  # or sequence, optional, map, sparse, opaque
    element: int = 0  # of a tensor, or of the tensors in a sequence or optional; 0 where the file does not say
    shape: tuple[int | str | None, ...] | None = None  # a number, a name, or unknown; None: of any rank


@dataclass(frozen=True, eq=False)
class Node:
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]
    name: str
    index: int  # place in its graph
    overload: str = ""

    @property
    def key(self) -> Key:
        return self.domain, self.op, self.overload

    def __str__(self) -> str:
        kind = f"{self.domain}.{self.op}" if self.domain else self.op
        return f"node {self.index} ({kind}{f', {self.name!r}' if self.name else ''})"


@dataclass(frozen=True, eq=False)
class Graph:
    name: str
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    initializers: Mapping[str, object]
    nodes: tuple[Node, ...]
    free: frozenset[str] = frozenset()  # names that it reads from graphs around it


@dataclass(frozen=True, eq=False)
class Function:
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    defaults: Mapping[str, object]
    nodes: tuple[Node, ...]
    opsets: Mapping[str, int]
    overload: str = ""


@dataclass(frozen=True, eq=False)
class Model:
    graph: Graph
    functions: Mapping[Key, Function]
    opsets: Mapping[str, int]
    path: str = ""
    producer: str = ""
    ir_version: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    training: tuple[Graph, ...] = ()  # the algorithms of training_info; nothing runs them by itself


def subgraphs(node: Node) -> list[Graph]:
    listed = [a if isinstance(a, (list, tuple)) else [a] for a in node.attributes.values()]
    return [g for graphs in listed for g in graphs if isinstance(g, Graph)]


def reads(node: Node) -> set[str]:
    """The names a node depends on: its inputs, and what its graphs read from around them."""
    return {name for name in node.inputs if name}.union(*(g.free for g in subgraphs(node)))
