"""Tiles on cores: where each is done first, and what comes there.

In: maps, block by block. Out: parts of tiles on a core: where a block lies there already, a part of that; otherwise a
new tile, whose parts are sent or copied. Weights are laid out ahead of time as tiles read them, so that they never
move; how often each may lie in memory is limited. Those that are streamed come from off-chip memory instead, once for
each node that reads them.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.cuts import Effort
from tessera.spatial.errors import MapError, SpaceError
from tessera.spatial.graph import Constant, Graph
from tessera.spatial.maps import Home, Map, Piece
from tessera.spatial.rectangles import Rectangle, rectangles
from tessera.spatial.routes import Routes
from tessera.spatial.tiles import Assembled, Box, Held, Loaded, Part, Received, Tile

Move = tuple[Part, int, int]  # a part, and where it goes in a tile: row, column
HOP = 0.25  # how much a hop to a port of the host or of off-chip memory weighs against a wait for it
SMALL = 4  # what takes fewer windows of a link between chips than these
UNITS = ("matrix", "vector", "copy", "link", "host", "dram")


@dataclass(eq=False)
class Blocks:
    """A home in tiles."""

    rows: list[int]
    columns: list[int]
    tiles: list[list[Tile]]

    def parts(self, box: Box, turned: bool) -> list[tuple[Part, int, int]]:
        """The tiles under a box: a part of each, and where it stands in the box, as that is read."""
        top, bottom, left, right = box
        parts = []
        for i in range(bisect_right(self.rows, top) - 1, bisect_left(self.rows, bottom)):
            r = self.rows[i]
            a, b = max(top, r), min(bottom, self.rows[i + 1])
            for j in range(bisect_right(self.columns, left) - 1, bisect_left(self.columns, right)):
                c = self.columns[j]
                d, e = max(left, c), min(right, self.columns[j + 1])
                part = Part(self.tiles[i][j], (a - r, b - r, d - c, e - c), turned)
                parts.append((part, d - left, a - top) if turned else (part, a - top, d - left))
        return parts


class Placement:
    def __init__(self, graph: Graph, machine: SpatialMachine, routes: Routes, effort: Effort) -> None:
        self.graph, self.machine, self.effort = graph, machine, effort
        self.random = random.Random(effort.seed)
        self.every, self.routes = routes.cores, routes
        self.number = {core: i for i, core in enumerate(self.every)}
        self.spans = _spans(self.every)
        self.every_host: list[Core] = []
        self.on_chip(None)
        self.every_host, self.batch = self.hosts, 0
        if not self.hosts:
            raise MapError(f"{machine.key} has no core with a host port: inputs cannot come in")
        self.ready = {unit: np.zeros(len(self.every)) for unit in UNITS}  # when units are done, by rough account
        self.done: dict[Tile, float] = {}
        self.held_bytes = np.zeros(len(self.every))
        self.tiles: list[Tile] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.blocks: dict[Home, Blocks] = {}
        self.constants: dict[Home, Constant] = {}
        self.streamed: set[Home] = set()  # constants that off-chip memory has
        self.room = effort.resident * machine.sram.size  # for weights on a core
        self.drams: dict[tuple[int, str], str] = {}  # the names of tensors there, by chip
        self.turn = 0  # of nodes: what one has loaded, the next loads anew
        self.fetched: dict[tuple, Part] = {}
        self.present: dict[Map, list[int]] = {}  # the cores on which a block is
        self.arranged_names: dict[tuple[Map, torch.dtype | None], str] = {}
        self.known_rectangles: dict[Map, list[Rectangle]] = {}

    def on_chip(self, chip: int | None) -> None:
        """Tiles go to the cores of a chip from now on; None: to any."""
        self.chip, self.span = chip, slice(0, len(self.every)) if chip is None else self.spans[chip]
        self.cores = self.every[self.span]
        hosts = [core for core in self.cores if self.machine.has_host(core)]
        self.hosts = hosts or self.every_host

    def choose(
        self, maps: list[Map], cycles: float, unit: str, copies: int = 0, at: Core | None = None
    ) -> tuple[Core, float]:
        """The core on which a tile would be done first, and when it could begin there. `copies`: on how many cores
        the weights among the maps may lie; 0: on any. `at`: the core that it is to be, if there is room."""
        span, low = self.span, self.span.start
        start = self.ready[unit][span].copy()
        linked = self.ready["link"][span]
        incoming = linked.copy()
        extra = np.zeros(len(self.cores))
        barred = np.zeros(len(self.cores), dtype=bool)
        width = self.machine.link.width
        for m in maps:
            there = [i - low for i in self.present.get(m, ()) if low <= i < span.stop]
            for tile, nbytes in self.reads(m):
                if tile is None:
                    more = np.full(len(self.cores), float(nbytes))
                    more[there] = 0
                    extra += more
                    if copies and len(there) >= copies:
                        barred |= more > 0
                    continue
                away = np.full(len(self.cores), nbytes / width)
                if low <= (here := self.number[tile.core]) < span.stop:
                    away[here - low] = 0
                away[there] = 0
                incoming += away
                far = self.routes.delays(tile.core, self.cores, self.chip)
                start = np.maximum(start, np.where(away > 0, self.done[tile] + far + away, self.done[tile]))
        moved = incoming > linked
        begin = np.where(moved, np.maximum(start, incoming), start)
        full = self.held_bytes[span] + extra > self.machine.sram.size * 0.9
        if full.all():
            need, has = int((self.held_bytes[span] + extra).min()), self.machine.sram.size
            raise SpaceError(f"weights need {need:,} of {has:,} bytes on the emptiest core of {self.machine.key}")
        if not (full | barred).all():
            full |= barred
        # Of cores that would be done at the same time, the one to which the least comes.
        cost = np.where(full, np.inf, begin + cycles + self.effort.stay * (incoming - linked))
        if self.effort.seed:
            cost = cost * np.array([1 + 0.05 * self.random.random() for _ in self.cores])
        wanted = self.number[at] - low if at is not None else -1
        best = wanted if at is not None and not full[wanted] else int(np.argmin(cost))
        return self.cores[best], float(begin[best])

    def emptiest(self) -> Core:
        """The core that holds least; of several the last, since the first have most to do."""
        return self.cores[-1 - int(np.argmin(self.held_bytes[self.span][::-1]))]

    def stays(self, maps: list[Map]) -> Core | None:
        """The core on which most of what a tile reads lies; not one that only passes it on from the host."""
        sizes: dict[Core, int] = {}
        for m in maps:
            for tile, nbytes in self.reads(m):
                if tile is not None and self.chip in (None, tile.core.chip):
                    key = tile.core
                    sizes[key] = sizes.get(key, 0) + (0 if isinstance(tile, Received) else nbytes)
        most = max(sizes, key=sizes.__getitem__, default=None)
        return most if most is not None and 2 * sizes[most] > sum(sizes.values()) > 0 else None

    def note(self, core: Core, *maps: Map) -> None:
        """Say that blocks are on a core, if only in parts."""
        for m in maps:
            there = self.present.setdefault(m, [])
            if self.number[core] not in there:
                there.append(self.number[core])

    def reads(self, m: Map) -> list[tuple[Tile | None, int]]:
        """The tiles under a map and how much of each; None for weights."""
        sizes: dict[Tile | None, int] = {}
        if self.is_streamed(m):
            return []  # from off-chip memory, it is as far to any core
        if self.is_held(m):
            return [(None, m.size * (m.homes[0].dtype.itemsize if m.homes else 1))]
        for r in self.rectangles(m):
            if r.home is None or r.home in self.constants:
                width = r.home.dtype.itemsize if r.home is not None else 1
                sizes[None] = sizes.get(None, 0) + r.height * r.width * width
                continue
            for part, _, _ in self.blocks[r.home].parts(r.home_box, r.turned):
                sizes[part.tile] = sizes.get(part.tile, 0) + part.nbytes
        return list(sizes.items())

    def is_held(self, m: Map) -> bool:
        return all(p.home is None or p.home in self.constants for p in m.pieces)

    def is_streamed(self, m: Map) -> bool:
        return bool(self.streamed) and any(home in self.streamed for home in m.homes)

    def rectangles(self, m: Map) -> list[Rectangle]:
        if m not in self.known_rectangles:
            self.known_rectangles[m] = rectangles(m)
        return self.known_rectangles[m]

    def fetch(self, core: Core, m: Map, turned: bool, dtype: torch.dtype) -> Part:
        """What a map says, on a core: where it lies there already, a part of that; otherwise a new tile. Zeros alone
        are of the type that is given."""
        key = (core, m, turned, self.turn if self.is_streamed(m) else 0, None if m.homes else dtype)
        if key not in self.fetched:
            self.fetched[key] = (
                self.hold(core, m, turned, dtype) if self.is_held(m) else self.fetch_anew(core, m, turned)
            )
            self.note(core, m)
        return self.fetched[key]

    def fetch_anew(self, core: Core, m: Map, turned: bool) -> Part:
        moves: list[Move] = []
        dtype = next(home for home in m.homes if home not in self.constants).dtype
        for r in self.rectangles(m):
            if r.home is None or r.home in self.constants:
                block = m.block((r.row, r.row + r.height), (r.column, r.column + r.width))
                moves.append((self.hold(core, block, False, dtype), r.row, r.column))
                continue
            for part, row, column in self.blocks[r.home].parts(r.home_box, r.turned):
                moves.append((part, r.row + row, r.column + column))
        if len(moves) == 1 and moves[0][0].tile.core == core and (turned or not moves[0][0].turned):
            return moves[0][0]
        if len(moves) == 1 and moves[0][0].turned and turned:  # sent as it lies, read turned
            part = moves[0][0]
            lies = Part(part.tile, part.box)
            tile = self.assembled(core, [(lies, 0, 0)], *lies.shape, dtype)
            return Part(tile, (0, tile.rows, 0, tile.columns), True)
        if any(part.turned and part.tile.core != core for part, _, _ in moves):
            moves = [
                (self.upright(part) if part.turned and part.tile.core != core else part, r, c) for part, r, c in moves
            ]
        return self.assembled(core, self.bundled(core, moves), m.shape[0], m.shape[1], dtype).whole

    def bundled(self, core: Core, moves: list[Move]) -> list[Move]:
        """Small parts that come from one chip are put together there, and travel as one: between chips, each would hold
        its links for the window in which it may arrive."""
        far: dict[int, list[Move]] = {}
        for move in moves:
            if (chip := move[0].tile.core.chip) != core.chip:
                far.setdefault(chip, []).append(move)
        for chip, group in far.items():
            top, left = min(r for _, r, _ in group), min(c for _, _, c in group)
            bottom = max(r + part.shape[0] for part, r, _ in group)
            right = max(c + part.shape[1] for part, _, c in group)
            nbytes, chips = sum(part.nbytes for part, _, _ in group), self.machine.chips
            at = Core(chip, core.row, core.column)
            small = chips is not None and nbytes < SMALL * chips.jitter * chips.width * len(group)
            filled = sum(math.prod(part.shape) for part, _, _ in group) == (bottom - top) * (right - left)
            if len(group) == 1 or not small or not filled or at not in self.number:
                continue
            inner = [(part, r - top, c - left) for part, r, c in group]
            key = ("bundle", at, *((part.tile, part.box, part.turned, r, c) for part, r, c in inner))
            if key not in self.fetched:
                dtype = group[0][0].tile.dtype
                self.fetched[key] = self.assembled(at, inner, bottom - top, right - left, dtype).whole
            moves = [move for move in moves if move[0].tile.core.chip != chip] + [(self.fetched[key], top, left)]
        return moves

    def upright(self, part: Part) -> Part:
        """A part turned on its own core, before it is sent."""
        key = ("turned", part.tile, part.box)
        if key not in self.fetched:
            self.fetched[key] = self.assembled(part.tile.core, [(part, 0, 0)], *part.shape, part.tile.dtype).whole
        return self.fetched[key]

    def assembled(self, core: Core, moves: list[Move], rows: int, columns: int, dtype: torch.dtype) -> Tile:
        first = moves[0][0].tile
        name = self.graph.fresh(f"{first.home or first.name}_at")
        tile = Assembled(name, dtype, rows, columns, core, moves, source=first.source, home=first.home)
        when = max(self.done.get(part.tile, 0.0) for part, _, _ in moves)
        cycles = sum(part.nbytes for part, _, _ in moves) / self.machine.link.width
        return self.add(tile, "link", cycles, when)

    def hold(self, core: Core, m: Map, turned: bool, dtype: torch.dtype) -> Part:
        """Weights as a tile reads them, arranged ahead of time."""
        stored = self.loaded if self.is_streamed(m) else self.held_part
        alone = self.rectangles(m) if len(m.pieces) == 1 else []
        if len(alone) == 1 and alone[0].home is not None and (turned or not alone[0].turned):
            home, box = alone[0].home, alone[0].home_box
            self.tensors.setdefault(home.name, self.constants[home].data)
            part = stored(core, home.name, box)
            return Part(part.tile, part.box, True) if alone[0].turned else part
        key = m, None if m.homes else dtype
        if key not in self.arranged_names:
            first = m.homes[0].name if m.homes else "zeros"
            name = self.arranged_names[key] = self.graph.fresh(f"{first}_arranged")
            self.tensors[name] = arranged(m, {home.name: of for home, of in self.constants.items()}, dtype)
        return stored(core, self.arranged_names[key], (0, m.shape[0], 0, m.shape[1]))

    def held_part(self, core: Core, name: str, box: Box) -> Part:
        key = (core, "held", name, box)
        if key not in self.fetched:
            self.fetched[key] = self.held(core, name, box).whole
        return self.fetched[key]

    def loaded(self, core: Core, name: str, box: Box) -> Part:
        """A block of a tensor in the chip's off-chip memory; one load for all cores that a node reads it on. What a
        core has room for it holds."""
        assert self.machine.dram is not None
        nbytes = (box[1] - box[0]) * (box[3] - box[2]) * self.tensors[name].dtype.itemsize
        if (core, "held", name, box) in self.fetched or self.held_bytes[self.number[core]] + nbytes <= self.room:
            return self.held_part(core, name, box)
        key = ("loaded", core.chip, name, box, self.turn)
        if key not in self.fetched:
            tensor, rows, columns = self.tensors[name], box[1] - box[0], box[3] - box[2]
            if (core.chip, name) not in self.drams:
                self.drams[core.chip, name] = self.graph.fresh(f"{name}_dram")
            dram = self.drams[core.chip, name]
            cycles = nbytes / self.machine.dram.width
            port = self.way_in(core, cycles)
            tile = Loaded(self.graph.fresh(name), tensor.dtype, rows, columns, port, name, box, dram, home=name)
            self.fetched[key] = self.add(tile, "dram", cycles, 0.0).whole
        part = self.fetched[key]
        if part.tile.core == core:
            return part
        at = ("loaded at", core, part.tile)
        if at not in self.fetched:
            self.fetched[at] = self.assembled(core, [(part, 0, 0)], *part.shape, part.tile.dtype).whole
        return self.fetched[at]

    def way_in(self, core: Core, cycles: float) -> Core:
        """A core of the same chip that reaches off-chip memory: near, and not one through which much comes already."""
        ports = [c for c in self.every[self.spans[core.chip]] if self.machine.has_dram(c)]
        far = self.routes.far_away(core, ports)
        cost = [self.ready["dram"][self.number[p]] + cycles * HOP * hops for p, hops in zip(ports, far, strict=True)]
        return ports[int(np.argmin(cost))]

    def held(self, core: Core, name: str, box: Box, state: bool = False) -> Tile:
        tensor, rows, columns = self.tensors[name], box[1] - box[0], box[3] - box[2]
        tile = Held(self.graph.fresh(name), tensor.dtype, rows, columns, core, name, box, state, home=name)
        self.held_bytes[self.number[core]] += tile.nbytes
        return self.add(tile, "copy", 0.0, 0.0)

    def add(self, tile: Tile, unit: str, cycles: float, when: float) -> Tile:
        self.tiles.append(tile)
        first = 0 if isinstance(tile, Held) else self.batch  # weights are everybody's
        tile.batch = max((part.tile.batch for part in tile.parts() if not isinstance(part.tile, Held)), default=first)
        number = self.number[tile.core]
        if isinstance(tile, Held):
            self.done[tile] = 0.0
            return tile
        self.ready[unit][number] = self.done[tile] = max(self.ready[unit][number], when) + cycles
        return tile

    def fresh(self, home: Home, i: int, j: int, rows: int, columns: int) -> str:
        """`up`, or `up_2_0` where there are several blocks."""
        name = home.name + (f"_{i}" if rows > 1 else "") + (f"_{j}" if columns > 1 else "")
        return name if rows * columns == 1 else self.graph.fresh(name)

    def whole(self, part: Part) -> Part:
        """A part as a tile of its own: rows are chosen by a whole tile, in a whole tile."""
        if part.is_whole:
            return part
        return self.assembled(part.tile.core, [(part, 0, 0)], *part.shape, part.tile.dtype).whole


def _spans(cores: list[Core]) -> dict[int, slice]:
    """Where the cores of each chip stand, which come one chip after the other."""
    spans: dict[int, slice] = {}
    for i, core in enumerate(cores):
        spans[core.chip] = slice(spans[core.chip].start if core.chip in spans else i, i + 1)
    return spans


def arranged(m: Map, constants: Mapping[str, Constant], dtype: torch.dtype) -> torch.Tensor:
    """Constants, by the names of their homes, as a map has them; zeros alone are of the type that is given."""
    out = torch.zeros(m.shape, dtype=m.homes[0].dtype if m.homes else dtype)
    for p in m.pieces:
        if p.home is not None:
            out[tuple(slice(*e) for e in p.box)] = _elements(constants[p.home.name].flat, p)
    return out


def _elements(data: torch.Tensor, p: Piece) -> torch.Tensor:
    """What a piece says of a home's data, which is one row after the other."""
    if min(p.strides) >= 0:
        return data.as_strided(p.shape, p.strides, data.storage_offset() + p.offset)  # data may be a part of a tensor
    places = torch.tensor(p.offset)
    for n, stride in zip(p.shape, p.strides, strict=True):
        places = places[..., None] + torch.arange(n) * stride
    return data[places]
