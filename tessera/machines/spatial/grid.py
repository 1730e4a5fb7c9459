"""Who is whose neighbour: cores on a chip, and chips.

In: a grid, how it is joined, what is dead. Out: cores and their links, each with the unit at either end. A ring or a
torus of two has one link between the two, not two.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

_STEPS = (("north", -1, 0), ("east", 0, 1), ("south", 1, 0), ("west", 0, -1))
_BACK = {"north": "south", "east": "west", "south": "north", "west": "east"}
Place = tuple[int, ...]


class Core(NamedTuple):
    """A core of a chip; on chip 0 its name is `row,column`, elsewhere `chip:row,column`."""

    chip: int
    row: int
    column: int

    def __str__(self) -> str:
        return f"{self.chip}:{self.row},{self.column}" if self.chip else f"{self.row},{self.column}"


class Edge(NamedTuple):
    """A link as the core at its beginning sees it."""

    unit: str  # of the core that sends
    arrives: str  # the unit of the core that receives
    width: int
    latency: int
    jitter: int


class _Link(Protocol):
    @property
    def topology(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def latency(self) -> int: ...
    @property
    def jitter(self) -> int: ...


class _Chips(_Link, Protocol):
    @property
    def count(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int] | None: ...
    @property
    def gates(self) -> tuple[Place, ...]: ...


def _around(row: int, column: int, grid: tuple[int, int], torus: bool) -> Iterator[tuple[str, int, int]]:
    """The neighbours in a grid: direction, row, column. A side of one or two does not wrap around."""
    rows, columns = grid
    for direction, down, right in _STEPS:
        r, c = row + down, column + right
        if torus and rows > 2:
            r %= rows
        if torus and columns > 2:
            c %= columns
        if 0 <= r < rows and 0 <= c < columns:
            yield direction, r, c


class Network:
    def __init__(
        self,
        grid: tuple[int, int],
        link: _Link,
        chips: _Chips | None,
        dead: tuple[Place, ...] = (),
        dead_links: tuple[tuple[Place, Place], ...] = (),
    ) -> None:
        self.grid, self.link, self.chips = grid, link, chips
        self.count = chips.count if chips else 1
        self._dead = {core for place in dead for core in self._named(place)}
        self._cut = {
            frozenset((a, b)) for x, y in dead_links for a, b in zip(self._named(x), self._named(y), strict=True)
        }
        self._neighbours: dict[Core, Mapping[Core, Edge]] = {}
        self.chip_neighbours = functools.cache(self._chip_neighbours)
        self.cores = functools.cache(self._cores)

    def _named(self, place: Place) -> list[Core]:
        """A place without a chip is that place on every chip."""
        return [Core(*place)] if len(place) == 3 else [Core(chip, *place) for chip in range(self.count)]

    def inside(self, core: Core) -> bool:
        return 0 <= core.chip < self.count and 0 <= core.row < self.grid[0] and 0 <= core.column < self.grid[1]

    def alive(self, core: Core) -> bool:
        return self.inside(core) and core not in self._dead

    @property
    def all_dead(self) -> bool:
        return len(self._dead) >= self.grid[0] * self.grid[1] * self.count

    def _cores(self, chip: int) -> tuple[Core, ...]:
        rows, columns = self.grid
        every = (Core(chip, r, c) for r in range(rows) for c in range(columns))
        return tuple(core for core in every if core not in self._dead)

    def _chip_neighbours(self, chip: int) -> tuple[int, ...]:
        """In the order of their links: link i ends at gate i mod the number of gates."""
        if self.chips is None or self.count == 1:
            return ()
        match self.chips.topology:
            case "all":
                return tuple(c for c in range(self.count) if c != chip)
            case "ring":
                return tuple(dict.fromkeys(((chip - 1) % self.count, (chip + 1) % self.count)))
        shape = self.chips.shape or (1, self.count)
        around = _around(*divmod(chip, shape[1]), shape, self.chips.topology == "torus")
        return tuple(r * shape[1] + c for _, r, c in around)

    def gate(self, chip: int, neighbour: int) -> tuple[Core, int]:
        """The core where the link to a neighbouring chip ends, and the number of that link."""
        assert self.chips is not None
        index = self.chip_neighbours(chip).index(neighbour)
        return Core(chip, *self.chips.gates[index % len(self.chips.gates)]), index

    def neighbours(self, core: Core) -> Mapping[Core, Edge]:
        if (known := self._neighbours.get(core)) is None:
            known = self._neighbours[core] = dict(self._edges(core)) if self.alive(core) else {}
        return known

    def _edges(self, core: Core) -> Iterator[tuple[Core, Edge]]:
        figures = self.link.width, self.link.latency, self.link.jitter
        for direction, row, column in _around(core.row, core.column, self.grid, self.link.topology == "torus"):
            if self._joined(core, other := Core(core.chip, row, column)):
                yield other, Edge(direction, _BACK[direction], *figures)
        for chip in self.chip_neighbours(core.chip):
            here, number = self.gate(core.chip, chip)
            if here == core:
                other, back = self.gate(chip, core.chip)
                if self._joined(core, other) and self.chips is not None:
                    yield (
                        other,
                        Edge(f"chip{number}", f"chip{back}", self.chips.width, self.chips.latency, self.chips.jitter),
                    )

    def _joined(self, core: Core, other: Core) -> bool:
        return other not in self._dead and frozenset((core, other)) not in self._cut

    def unreachable(self) -> Core | None:
        """A core that the first one cannot reach. A whole grid is connected; only what is dead can cut it."""
        if not self._dead and not self._cut:
            return None
        every = [core for chip in range(self.count) for core in self.cores(chip)]
        reached, waiting = {every[0]}, [every[0]]
        while waiting:
            new = [core for core in self.neighbours(waiting.pop()) if core not in reached]
            reached.update(new)
            waiting += new
        return next((core for core in every if core not in reached), None)
