"""The graph of homes: what a program computes on matrices, before it is cut into tiles.

In: what the importer says of each equation. Out: nodes, each of which fills one *home*, a matrix of rows and columns,
and says by maps what it reads. Invariant: a node's maps mention only homes before its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Union

import numpy as np
import torch

from tessera.ir.equation import NOWHERE, Source, Value
from tessera.spatial.listing.types import Argument
from tessera.spatial.maps import Home, Map


@dataclass(frozen=True)
class Number:
    """A constant in an expression."""

    value: float | int | bool


@dataclass(frozen=True)
class Apply:
    """A function of the vector unit; `sum`, `max`, `min` and `argmax` go along rows and leave one column."""

    fn: str
    args: tuple[Tree, ...]


Tree = Union[int, Number, Apply]  # noqa: UP007  (a name that refers to itself); an int is the operand of that number
REDUCTIONS = frozenset(("sum", "max", "min", "prod", "argmax", "argmin"))


def functions(tree: Tree) -> Iterator[str]:
    if isinstance(tree, Apply):
        yield tree.fn
        for a in tree.args:
            yield from functions(a)


def depth(tree: Tree) -> int:
    """How many functions stand over each other."""
    return 1 + max(map(depth, tree.args), default=0) if isinstance(tree, Apply) else 0


def reduces(tree: Tree) -> bool:
    return any(fn in REDUCTIONS for fn in functions(tree))


def shift(tree: Tree, places: list[int]) -> Tree:
    """The tree with its operands numbered anew."""
    if isinstance(tree, int):
        return places[tree]
    return tree if isinstance(tree, Number) else Apply(tree.fn, tuple(shift(a, places) for a in tree.args))


@dataclass(frozen=True)
class Place:
    batch: int = 0
    rank: int = 0
    equation: int = 0


ALONE = Place()


@dataclass(eq=False)
class Node:
    """`place` is whose it is: its batch, its rank, and the number of its equation. `chip` is where it runs; None: on
    any."""

    home: Home
    place: Place = field(default=ALONE, kw_only=True)
    chip: int | None = field(default=None, kw_only=True)

    @property
    def maps(self) -> list[Map]:
        return []


@dataclass(eq=False)
class Input(Node):
    """What the host sends: rows of a tensor, from one on."""

    tensor: str
    first: int = 0


@dataclass(eq=False)
class Constant(Node):
    """Weights and tables, which lie in memory before the program begins; `state` is written and kept."""

    tensor: torch.Tensor
    state: bool = False
    grain: int = 1  # columns of a state that stay together

    @functools.cached_property
    def data(self) -> torch.Tensor:
        """As a matrix, in any strides: a weight that is read turned is not copied for it."""
        return self.tensor.reshape(self.home.rows, self.home.columns)

    @functools.cached_property
    def flat(self) -> torch.Tensor:
        """One row after the other, as maps count; what nobody asks for is never laid out."""
        return self.data.contiguous().view(-1)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(eq=False)
class Product(Node):
    """For each of a batch: the product of [m, k] and [k, n]. The results lie below each other."""

    x: Map  # [batch, m, k]
    w: Map  # [batch, k, n]
    dtype: torch.dtype  # of the factors

    @property
    def maps(self) -> list[Map]:
        return [self.x, self.w]


@dataclass(eq=False)
class Expression(Node):
    """Functions of elements, over maps of [rows, columns]; with a reduction at its root, one column is left."""

    tree: Tree
    operands: list[Map]

    @property
    def maps(self) -> list[Map]:
        return self.operands

    @property
    def columns(self) -> int:
        """Of what is computed, before a reduction."""
        return max((o.shape[1] for o in self.operands), default=self.home.columns)


@dataclass(eq=False)
class Gather(Node):
    """Rows of a table, chosen by numbers that are known when the program runs."""

    table: Map  # [rows of the table, columns]
    index: Map  # [rows, 1]

    @property
    def maps(self) -> list[Map]:
        return [self.table, self.index]


@dataclass(eq=False)
class Scatter(Node):
    """Rows of a state, chosen when the program runs, are written in place; the home is the state afterwards."""

    state: Home
    index: Map  # [rows, 1]
    rows: Map  # [rows, columns]

    @property
    def maps(self) -> list[Map]:
        return [self.index, self.rows]


@dataclass(eq=False)
class HostCall:
    """An operator that the host runs: `arguments` are the listing's, in which tensors have these names."""

    op: str
    arguments: tuple[tuple[str, Argument], ...]
    operands: dict[str, tuple[torch.dtype, tuple[int, ...], Map]]  # of [rows, columns], by name
    results: int  # how many it gives
    source: Source


@dataclass(eq=False)
class Hosted(Node):
    """A result of an operator that the host runs."""

    call: HostCall
    number: int
    shape: tuple[int, ...]

    @property
    def maps(self) -> list[Map]:
        return [m for _, _, m in self.call.operands.values()]


@dataclass(eq=False)
class Left(Node):
    """What an earlier part of the program left on this chip, under the home's name."""


@dataclass(eq=False)
class Leave(Node):
    """Leaves a value on this chip for later parts, under the home's name."""

    value: Map  # [rows, columns]

    @property
    def maps(self) -> list[Map]:
        return [self.value]


@dataclass(eq=False)
class Graph:
    name: str
    nodes: list[Node] = field(default_factory=list)
    outputs: list[tuple[str, torch.dtype, tuple[int, ...], Map]] = field(default_factory=list)
    inputs: list[tuple[str, torch.dtype, tuple[int, ...], Home]] = field(default_factory=list)
    given: dict[Value, str] = field(default_factory=dict)  # the tensors that inputs are
    homes: list[Home] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    place: Place = ALONE  # of the nodes that are added

    def add(self, node: Node) -> None:
        node.place = self.place
        self.nodes.append(node)

    def home(self, name: str, dtype: torch.dtype, rows: int, columns: int, source: Source = NOWHERE) -> Home:
        base = self.homes[-1].base + self.homes[-1].size if self.homes else 0
        added = Home(self.fresh(name), dtype, rows, columns, base, source)
        self.homes.append(added)
        return added

    def left(self, number: int, dtype: torch.dtype, rows: int, columns: int) -> Home:
        """The home of a value that is left on a chip; every rank and every part of the program calls it the same."""
        home = self.home("", dtype, rows, columns)
        home.name = f"left{number}"
        self.names[home.name] = 1
        return home

    def fresh(self, name: str) -> str:
        if not name.replace("_", "a").isalnum():
            name = "".join(c if c.isalnum() else "_" for c in name) or "v"
        name = f"v{name}" if name[0].isdigit() else name
        count = self.names[name] = self.names.get(name, 0) + 1
        return name if count == 1 else self.fresh(f"{name}_{count}")

    def elements_read(self, home: Home) -> int:
        """How many elements of a home anybody reads."""
        seen = np.zeros(home.size, dtype=bool)
        for m in [*(m for n in self.nodes for m in n.maps), *(m for *_, m in self.outputs)]:
            for p in m.pieces:
                if p.home is home:
                    steps = [abs(s) for s in p.strides]
                    first = p.offset + sum(min(0, s * (n - 1)) for s, n in zip(p.strides, p.shape, strict=True))
                    np.lib.stride_tricks.as_strided(seen[first:], p.shape, steps)[...] = True
        return int(seen.sum())

    def live(self) -> None:
        """Drop nodes that nothing reads."""
        wanted: set[Home] = set()
        for *_, m in self.outputs:
            wanted.update(m.homes)
        kept = []
        for node in reversed(self.nodes):
            if node.home in wanted or isinstance(node, Scatter | Leave):
                kept.append(node)
                for m in node.maps:
                    wanted.update(m.homes)
                if isinstance(node, Scatter):
                    wanted.add(node.state)
        self.nodes = kept[::-1]

    def reads_what_is(self) -> bool:
        """Whether nobody reads a state as it was before rows of it were written."""
        written: set[Home] = set()
        for node in self.nodes:
            if any(not written.isdisjoint(m.homes) for m in node.maps):
                return False
            if isinstance(node, Scatter):
                written.add(node.state)
        return all(written.isdisjoint(m.homes) for *_, m in self.outputs)
