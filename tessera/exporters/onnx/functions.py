"""Repeated blocks become local functions.

In: nodes, each of which knows the module that it comes from. Out: fewer nodes, and functions. Members of a list of
modules (`blocks.0`, `blocks.1`, …) whose nodes are the same, but for the values that they read, are calls of one
function. What a member reads from outside it is an argument; small constants that all of them read stand inside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tessera.exporters.onnx.graph import Node

DOMAIN = "tessera.blocks"
SMALLEST = 4  # nodes that are worth a function


@dataclass
class Function:
    name: str
    inputs: list[str]
    outputs: list[str]
    nodes: list[Node]
    constants: dict[str, torch.Tensor]


@dataclass
class _Member:
    module: str
    nodes: list[Node]
    reads: list[str]  # from outside, in the order of their first reader
    makes: list[str]

    def pattern(self, constants: dict[str, torch.Tensor]) -> tuple:
        """Equal for members that are the same but for the names of their values."""
        number = {name: f"in{i}" for i, name in enumerate(self.reads)}
        number |= {name: f"out{i}" for i, name in enumerate(self.makes)}
        number |= {name: name for name in self.reads if name in constants}
        return tuple(
            (n.kind, n.domain, tuple(number.get(i, i) for i in n.inputs), len(n.outputs), _frozen(n.attributes))
            for n in self.nodes
        )


def outline(
    nodes: list[Node], outputs: Iterable[str], constants: dict[str, torch.Tensor]
) -> tuple[list[Node], list[Function]]:
    """The nodes with calls in place of repeated blocks, and the functions that are called."""
    functions: list[Function] = []
    for container in _containers(nodes):
        members = _members(nodes, container)
        alike: dict[tuple, list[_Member]] = {}
        for member in members:
            if len(member.nodes) >= SMALLEST and not any(n.inner for n in member.nodes):
                alike.setdefault(member.pattern(constants), []).append(member)
        for group in alike.values():
            if len(group) < 2:
                continue
            function = _function(
                f"{container.replace('.', '_') or 'block'}_{len(functions)}", group, nodes, outputs, constants
            )
            called = _called(nodes, group, function)
            if called is not None:
                nodes = called
                functions.append(function)
    return nodes, functions


def _containers(nodes: list[Node]) -> list[str]:
    """Modules with numbered members, the outer ones first."""
    names: dict[str, None] = {}
    for node in nodes:
        parts = node.source.module.split(".")
        for i, part in enumerate(parts):
            if part.isdigit():
                names[".".join(parts[:i])] = None
    return sorted(names, key=lambda name: (name.count("."), name))


def _members(nodes: list[Node], container: str) -> list[_Member]:
    start = f"{container}." if container else ""
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        rest = node.source.module.removeprefix(start)
        if node.domain == DOMAIN or (start and rest == node.source.module):
            continue
        part = rest.split(".")[0]
        if part.isdigit():
            groups.setdefault(start + part, []).append(node)
    shared = _shared(groups)
    return [_member(module, [n for n in group if id(n) not in shared]) for module, group in groups.items()]


def _shared(groups: dict[str, list[Node]]) -> set[int]:
    """Nodes that one member has for all: it reads what they give, and so do others; they read nothing that members
    compute but such nodes."""
    home = {o: module for module, group in groups.items() for n in group for o in n.outputs}
    read_by: dict[str, set[str]] = {}
    for module, group in groups.items():
        for n in group:
            for i in n.inputs:
                read_by.setdefault(i, set()).add(module)
    free: dict[str, Node] = {}  # by what they give
    for group in groups.values():
        for n in group:
            if all(i not in home or i in free for i in n.inputs) and not n.inner:
                free |= dict.fromkeys(n.outputs, n)
    shared: set[int] = set()
    pending = [n for o, n in free.items() if read_by.get(o, set()) > {home[o]}]
    while pending:
        n = pending.pop()
        if id(n) not in shared:
            shared.add(id(n))
            pending += [free[i] for i in n.inputs if i in free]
    return shared


def _member(module: str, nodes: list[Node]) -> _Member:
    makes = [o for n in nodes for o in n.outputs]
    own = set(makes)
    reads = dict.fromkeys(i for n in nodes for i in n.inputs if i and i not in own)
    return _Member(module, nodes, list(reads), makes)


def _function(
    name: str, group: list[_Member], nodes: list[Node], outputs: Iterable[str], constants: dict[str, torch.Tensor]
) -> Function:
    first = group[0]
    inside = {r: constants[r] for r in first.reads if r in constants}
    wanted: set[int] = set()
    for member in group:
        own = set(map(id, member.nodes))
        places = {o: i for i, o in enumerate(member.makes)}
        read = {i for n in nodes if id(n) not in own for i in n.inputs} | {i for n in nodes for i in _inner_reads(n)}
        wanted |= {i for o, i in places.items() if o in read or o in outputs}
    return Function(
        name,
        [r for r in first.reads if r not in inside],
        [first.makes[i] for i in sorted(wanted)],
        first.nodes,
        inside,
    )


def _inner_reads(node: Node) -> set[str]:
    return {i for g in node.inner.values() for n in g.nodes for i in (*n.inputs, *_inner_reads(n))}


def _called(nodes: list[Node], group: list[_Member], function: Function) -> list[Node] | None:
    """The nodes with one call for each member, in an order that computes what is read first; None where a member reads
    what another node makes of it."""
    first = group[0]
    gone: dict[int, Node] = {}
    calls: list[Node] = []
    for member in group:
        inputs = [r for r, own in zip(member.reads, first.reads, strict=True) if own not in function.constants]
        places = {o: i for i, o in enumerate(first.makes)}
        outputs = [member.makes[places[o]] for o in function.outputs]
        call = Node(function.name, inputs, outputs, {}, DOMAIN, _at(member))
        calls.append(call)
        gone |= {id(n): call for n in member.nodes}
    placed: dict[int, Node] = {}
    for node in nodes:
        node = gone.get(id(node), node)
        placed.setdefault(id(node), node)
    return _sorted(list(placed.values()))


def _at(member: _Member):  # noqa: ANN202
    source = member.nodes[0].source
    return type(source)(source.file, source.line, member.module, source.note)


def _sorted(nodes: list[Node]) -> list[Node] | None:
    """In an order in which every value is made before it is read, as near to the given one as can be."""
    maker = {o: n for n in nodes for o in n.outputs}
    state: dict[int, int] = {}  # 1: being placed, 2: placed
    out: list[Node] = []
    stack: list[tuple[Node, bool]] = [(n, False) for n in reversed(nodes)]
    while stack:
        node, ready = stack.pop()
        if ready:
            state[id(node)] = 2
            out.append(node)
            continue
        if state.get(id(node)):
            continue
        state[id(node)] = 1
        stack.append((node, True))
        for name in reversed([*node.inputs, *sorted(_inner_reads(node))]):
            needed = maker.get(name)
            if needed is None or state.get(id(needed)) == 2:
                continue
            if state.get(id(needed)) == 1:
                return None
            stack.append((needed, False))
    return out


def _frozen(attributes: dict) -> tuple:
    return tuple(
        sorted(
            (k, str(v.tolist()) + str(v.dtype) if isinstance(v, torch.Tensor) else str(v))
            for k, v in attributes.items()
        )
    )
