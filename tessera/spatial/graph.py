"""The graph of homes: what a program computes on matrices, before it is cut into tiles.

In: what the importer says of each equation. Out: nodes, each of which fills one *home*, a matrix of rows and columns.
All elements of all homes are numbered through, and what a node reads is a matrix of such numbers, a *map*. So a
transpose, a slice, a concatenation or a window is no computation: it is another map over the same homes. The number -1
stands for zero. Invariant: a node's maps mention only homes before its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Union

import numpy as np
import torch

from tessera.ir.equation import NOWHERE, Source

ZERO = -1  # the number of an element that is zero and lies nowhere


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


def reduces(tree: Tree) -> bool:
    return any(fn in REDUCTIONS for fn in functions(tree))


def shift(tree: Tree, places: list[int]) -> Tree:
    """The tree with its operands numbered anew."""
    if isinstance(tree, int):
        return places[tree]
    return tree if isinstance(tree, Number) else Apply(tree.fn, tuple(shift(a, places) for a in tree.args))


@dataclass(eq=False)
class Home:
    """A matrix that is filled once: its elements are numbered from `base` on, row by row."""

    name: str
    dtype: torch.dtype
    rows: int
    columns: int
    base: int
    source: Source = NOWHERE

    @property
    def size(self) -> int:
        return self.rows * self.columns


@dataclass(eq=False)
class Node:
    home: Home

    @property
    def maps(self) -> list[np.ndarray]:
        return []


@dataclass(eq=False)
class Input(Node):
    """What the host sends."""


@dataclass(eq=False)
class Constant(Node):
    """Weights and tables, which lie in memory before the program begins; `state` is written and kept."""

    data: torch.Tensor
    state: bool = False
    grain: int = 1  # columns of a state that stay together


@dataclass(eq=False)
class Product(Node):
    """For each of a batch: the product of [m, k] and [k, n]. The results lie below each other."""

    x: np.ndarray  # [batch, m, k]
    w: np.ndarray  # [batch, k, n]
    dtype: torch.dtype  # of the factors

    @property
    def maps(self) -> list[np.ndarray]:
        return [self.x, self.w]


@dataclass(eq=False)
class Expression(Node):
    """Functions of elements, over maps of [rows, columns]; with a reduction at its root, one column is left."""

    tree: Tree
    operands: list[np.ndarray]

    @property
    def maps(self) -> list[np.ndarray]:
        return self.operands

    @property
    def columns(self) -> int:
        """Of what is computed, before a reduction."""
        return max((o.shape[1] for o in self.operands), default=self.home.columns)


@dataclass(eq=False)
class Gather(Node):
    """Rows of a table, chosen by numbers that are known when the program runs."""

    table: np.ndarray  # [rows of the table, columns]
    index: np.ndarray  # [rows, 1]

    @property
    def maps(self) -> list[np.ndarray]:
        return [self.table, self.index]


@dataclass(eq=False)
class Scatter(Node):
    """Rows of a state, chosen when the program runs, are written in place; the home is the state afterwards."""

    state: Home
    index: np.ndarray  # [rows, 1]
    rows: np.ndarray  # [rows, columns]

    @property
    def maps(self) -> list[np.ndarray]:
        return [self.index, self.rows]


@dataclass(eq=False)
class Graph:
    name: str
    nodes: list[Node] = field(default_factory=list)
    outputs: list[tuple[str, torch.dtype, tuple[int, ...], np.ndarray]] = field(default_factory=list)
    inputs: list[tuple[str, torch.dtype, tuple[int, ...], Home]] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    homes: list[Home] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)

    def home(self, name: str, dtype: torch.dtype, rows: int, columns: int, source: Source = NOWHERE) -> Home:
        base = self.homes[-1].base + self.homes[-1].size if self.homes else 0
        made = Home(self.fresh(name), dtype, rows, columns, base, source)
        self.homes.append(made)
        self.bases.append(base)
        return made

    def fresh(self, name: str) -> str:
        name = "".join(c if c.isalnum() else "_" for c in name) or "v"
        name = f"v{name}" if name[0].isdigit() else name
        count = self.names[name] = self.names.get(name, 0) + 1
        return name if count == 1 else self.fresh(f"{name}_{count}")

    def home_at(self, number: int) -> Home:
        return self.homes[bisect_right(self.bases, number) - 1]

    def node_of(self) -> dict[Home, Node]:
        return {n.home: n for n in self.nodes}

    def homes_in(self, index: np.ndarray) -> list[Home]:
        """The homes that a map mentions."""
        if not index.size:
            return []
        low, high = int(index.min()), int(index.max())
        if low >= 0 and self.home_at(low) is self.home_at(high):  # most maps mention one
            return [self.home_at(low)]
        places = np.searchsorted(np.asarray(self.bases), index.reshape(-1), "right")
        return [self.homes[i - 1] for i in np.flatnonzero(np.bincount(places)).tolist() if i]

    def elements_read(self, home: Home) -> int:
        """How many elements of a home anybody reads."""
        seen = np.zeros(home.size, dtype=bool)
        for index in [*(m for n in self.nodes for m in n.maps), *(index for *_, index in self.outputs)]:
            places = index.reshape(-1) - home.base
            seen[places[(places >= 0) & (places < home.size)]] = True
        return int(seen.sum())

    def live(self) -> None:
        """Drop nodes that nothing reads."""
        wanted: set[Home] = set()
        for _, _, _, index in self.outputs:
            wanted.update(self.homes_in(index))
        kept = []
        for node in reversed(self.nodes):
            if node.home in wanted or isinstance(node, Scatter):
                kept.append(node)
                for m in node.maps:
                    wanted.update(self.homes_in(m))
                if isinstance(node, Scatter):
                    wanted.add(node.state)
        self.nodes = kept[::-1]
