"""A program of tiles: what each core computes, not when.

A tile is a matrix that lies on one core and is filled once. It is held (a weight), comes from the host or from off-chip
memory, is assembled from parts of other tiles (wherever they lie), or is computed from parts of tiles on its own core.
Invariant: a tile reads only tiles before it; everything but an assembled one reads its own core alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tessera.ir.equation import NOWHERE, Source
from tessera.machines.spatial import Core
from tessera.spatial.graph import Tree
from tessera.spatial.listing.types import Hosted as HostAction

Box = tuple[int, int, int, int]  # rows from, to, columns from, to


@dataclass(eq=False)
class Tile:
    name: str
    dtype: torch.dtype
    rows: int
    columns: int
    core: Core
    source: Source = field(default=NOWHERE, kw_only=True)
    home: str = field(default="", kw_only=True)  # the matrix that it is a block of
    batch: int = field(default=0, kw_only=True)  # of several that go through the program

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def buffer(self) -> Tile:
        """The tile whose memory it has."""
        return self

    @property
    def whole(self) -> Part:
        return Part(self, (0, self.rows, 0, self.columns))

    def parts(self) -> Iterator[Part]:
        """What it reads."""
        yield from ()


@dataclass(frozen=True, eq=False)
class Part:
    """A rectangle of a tile; turned, its rows are read as columns."""

    tile: Tile
    box: Box
    turned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        top, bottom, left, right = self.box
        return (right - left, bottom - top) if self.turned else (bottom - top, right - left)

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.tile.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        return self.box == (0, self.tile.rows, 0, self.tile.columns)


@dataclass(eq=False)
class Held(Tile):
    """A block of a tensor that lies in memory before the program begins. Without a tensor: what another part of the
    program leaves."""

    tensor: str
    box: Box
    state: bool = False


@dataclass(eq=False)
class Received(Tile):
    """A block of an input, from the host."""

    tensor: str
    box: Box


@dataclass(eq=False)
class Loaded(Tile):
    """A block of a tensor in off-chip memory, on a core that reaches it. `dram` is the tensor's name there."""

    tensor: str
    box: Box
    dram: str


@dataclass(eq=False)
class Assembled(Tile):
    """Parts of tiles, each at a row and a column of this one."""

    moves: list[tuple[Part, int, int]]

    def parts(self) -> Iterator[Part]:
        return (part for part, _, _ in self.moves)


@dataclass(eq=False)
class Kept(Assembled):
    """A value written into a tile that stays in memory behind this part of the program."""

    into: Tile

    @property
    def buffer(self) -> Tile:
        return self.into


@dataclass(eq=False)
class Multiplied(Tile):
    """The sum of products."""

    factors: list[tuple[Part, Part]]

    def parts(self) -> Iterator[Part]:
        return (part for pair in self.factors for part in pair)


@dataclass(eq=False)
class Computed(Tile):
    """An expression over parts, which broadcast."""

    tree: Tree
    operands: list[Part]

    def parts(self) -> Iterator[Part]:
        return iter(self.operands)


@dataclass(eq=False)
class Gathered(Tile):
    """Rows of a table, chosen by a column of numbers."""

    table: Part
    index: Part

    def parts(self) -> Iterator[Part]:
        return iter((self.table, self.index))


@dataclass(eq=False)
class Scattered(Tile):
    """Rows written into a tile in place; this is what that tile holds afterwards."""

    state: Part
    index: Part
    values: Part

    def parts(self) -> Iterator[Part]:
        return iter((self.state, self.index, self.values))

    @property
    def buffer(self) -> Tile:
        return self.state.tile.buffer


@dataclass(frozen=True, eq=False)
class Called:
    """An operator that the host runs, asked for by a core with a host port: between what is sent there and what comes
    back."""

    action: HostAction
    core: Core
    source: Source = NOWHERE


@dataclass(frozen=True, eq=False)
class Given:
    """A part that goes to the host: a block of an output, or of what an operator there reads."""

    tensor: str
    box: Box
    part: Part


@dataclass(eq=False)
class Tiles:
    """A whole program. Inputs and outputs are matrices here; `shapes` says what the user calls them with."""

    name: str
    tiles: list[Tile]
    given: list[Given]
    tensors: dict[str, torch.Tensor]  # what is held, by name
    inputs: list[tuple[str, torch.dtype, tuple[int, ...]]]
    outputs: list[tuple[str, torch.dtype, tuple[int, ...]]]
    calls: list[Called] = field(default_factory=list)
    hosted: list[tuple[str, torch.dtype, tuple[int, ...]]] = field(default_factory=list)  # what calls read and give
