"""From homes to tiles, each on a core.

In: a graph, a machine, and what the mapping may do. Out: a program of tiles. Nodes are cut one after the other
(`cuts`), and each tile goes to the core where it would be done first: when that core is free, when what the tile
reads has come there, and whether its weights fit. Weights are laid out ahead of time as tiles read them, so that they
never move.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial import cuts, durations
from tessera.spatial.cuts import Effort, cut
from tessera.spatial.errors import MapError, SpaceError
from tessera.spatial.graph import (
    Apply,
    Constant,
    Expression,
    Gather,
    Graph,
    Home,
    Input,
    Node,
    Product,
    Scatter,
    Tree,
    reduces,
)
from tessera.spatial.pieces import Piece, pieces, uniform
from tessera.spatial.routes import Routes
from tessera.spatial.tiles import (
    Assembled,
    Box,
    Computed,
    Gathered,
    Given,
    Held,
    Multiplied,
    Part,
    Received,
    Scattered,
    Tile,
    Tiles,
)


@dataclass(eq=False)
class Blocks:
    """A home in tiles."""

    rows: list[int]
    columns: list[int]
    tiles: list[list[Tile]]

    def parts(self, box: Box, turned: bool) -> list[tuple[Part, int, int]]:
        """The tiles under a box: a part of each, and where it stands in the box, as that is read."""
        top, bottom, left, right = box
        found = []
        for i in range(np.searchsorted(self.rows, top, "right") - 1, np.searchsorted(self.rows, bottom, "left")):
            for j in range(
                np.searchsorted(self.columns, left, "right") - 1, np.searchsorted(self.columns, right, "left")
            ):
                r, c = self.rows[i], self.columns[j]
                a, b = max(top, r), min(bottom, self.rows[i + 1])
                d, e = max(left, c), min(right, self.columns[j + 1])
                part = Part(self.tiles[i][j], (a - r, b - r, d - c, e - c), turned)
                found.append((part, d - left, a - top) if turned else (part, a - top, d - left))
        return found


class Tiling:
    def __init__(self, graph: Graph, machine: SpatialMachine, routes: Routes, effort: Effort) -> None:
        self.graph, self.machine, self.effort = graph, machine, effort
        self.random = random.Random(effort.seed)
        self.cores = routes.cores
        self.number = {core: i for i, core in enumerate(self.cores)}
        self.hops = routes.delays
        self.hosts = [core for core in self.cores if machine.has_host(core)]
        if not self.hosts:
            raise MapError(f"{machine.key} has no core with a host port: inputs cannot come in")
        self.ready = np.zeros(len(self.cores))  # when each core is done with what it has, by rough account
        self.done: dict[Tile, float] = {}
        self.held_bytes = np.zeros(len(self.cores))
        self.tiles: list[Tile] = []
        self.given: list[Given] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.blocks: dict[Home, Blocks] = {}
        self.constants: dict[Home, Constant] = {}
        self.fetched: dict[tuple, Part] = {}
        self.looked_at: deque[tuple[np.ndarray, list[Piece]]] = deque(maxlen=8)

    def run(self) -> Tiles:
        for node in self.graph.nodes:
            self.node(node)
        for name, dtype, _, index in self.graph.outputs:
            self.output(name, dtype, index)
        inputs = [(name, dtype, shape) for name, dtype, shape, _ in self.graph.inputs]
        outputs = [(name, dtype, shape) for name, dtype, shape, _ in self.graph.outputs]
        return Tiles(self.graph.name, self.tiles, self.given, self.tensors, inputs, outputs)

    def node(self, node: Node) -> None:
        match node:
            case Constant():
                if node.state:
                    self.state(node)
                else:
                    self.constants[node.home] = node
            case Input():
                self.input(node)
            case Product():
                self.product(node)
            case Expression():
                self.expression(node)
            case Gather():
                self.gather(node)
            case Scatter():
                self.scatter(node)

    # --- nodes ---

    def input(self, node: Input) -> None:
        home = node.home
        rows = cut(home.rows, cuts.block_parts(home.rows, home.columns, home.dtype.itemsize, self.effort))
        grid = []
        for i, (top, bottom) in enumerate(zip(rows[:-1], rows[1:], strict=True)):
            core = self.hosts[i % len(self.hosts)]
            box = (top, bottom, 0, home.columns)
            tile = Received(self.fresh(home, i, 0, len(rows) - 1, 1), home.dtype, bottom - top, home.columns, core,
                            home.name, box, home=home.name)  # fmt: skip
            self.add(tile, tile.nbytes / self.machine.host.width, 0.0)  # type: ignore[union-attr]
            grid.append([tile])
        self.blocks[home] = Blocks(rows, [0, home.columns], grid)

    def product(self, node: Product) -> None:
        home, machine = node.home, self.machine
        if durations.dtype_name(node.dtype) not in machine.matrix.passes:
            known = ", ".join(machine.matrix.passes)
            raise MapError(f"{machine.key}'s array multiplies {known}, not {node.dtype}: called at {home.source}")
        batch, m, k = node.x.shape
        n = node.w.shape[2]
        constant = all(h in self.constants for h in self.graph.homes_in(node.w[:1]))
        grid = cuts.product_grid(machine, node, self.effort, constant)
        inner = cut(m, grid.rows, machine.matrix.rows if machine.matrix.stationary == "output" else 1)
        rows = [b * m + r for b in range(batch) for r in inner[:-1]] + [batch * m]
        columns = cut(n, grid.columns, machine.matrix.columns if machine.matrix.stationary != "input" else 1)
        depth = cut(k, grid.depth, machine.matrix.rows if machine.matrix.stationary != "output" else 1)
        tiles: list[list[Tile]] = []
        for i, (top, bottom) in enumerate(zip(rows[:-1], rows[1:], strict=True)):
            b, r = divmod(top, m)
            row: list[Tile] = []
            for j, (left, right) in enumerate(zip(columns[:-1], columns[1:], strict=True)):
                name = self.fresh(home, i, j, len(rows) - 1, len(columns) - 1)
                spans = list(zip(depth[:-1], depth[1:], strict=True))
                partial = [
                    self.multiplied(
                        node, name if len(spans) == 1 else self.graph.fresh(f"{name}_k{s}"),
                        node.x[b, r : r + bottom - top, lo:hi], node.w[b, lo:hi, left:right],
                    )
                    for s, (lo, hi) in enumerate(spans)
                ]  # fmt: skip
                row.append(partial[0] if len(partial) == 1 else self.summed(node, name, partial))
            tiles.append(row)
        self.blocks[home] = Blocks(rows, columns, tiles)

    def multiplied(self, node: Product, name: str, x: np.ndarray, w: np.ndarray) -> Tile:
        m, k = x.shape
        n = w.shape[1]
        cycles = cuts._tile_cycles(self.machine, m, k, n, node, node.dtype.itemsize)
        core, when = self.choose([x, w], cycles)
        factors = [(self.fetch(core, x, True), self.fetch(core, w, True))]
        tile = Multiplied(name, node.home.dtype, m, n, core, factors, source=node.home.source, home=node.home.name)
        return self.add(tile, cycles, when)

    def summed(self, node: Product, name: str, partial: list[Tile]) -> Tile:
        """The sum of parts that lie on several cores."""
        home, first = node.home, partial[0]
        core = partial[-1].core
        operands = [self.brought(core, p) for p in partial]
        tree: Tree = 0
        for i in range(1, len(operands)):
            tree = Apply("add", (tree, i))
        tile = Computed(
            name, home.dtype, first.rows, first.columns, core, tree, operands, source=home.source, home=home.name
        )
        return self.add(
            tile,
            durations.expression(self.machine, tree, first.rows * first.columns),
            max(map(self.done.__getitem__, partial)),
        )

    def brought(self, core: Core, tile: Tile) -> Part:
        if tile.core == core:
            return tile.whole
        copy = Assembled(self.graph.fresh(f"{tile.name}_at"), tile.dtype, tile.rows, tile.columns, core,
                         [(tile.whole, 0, 0)], source=tile.source, home=tile.home)  # fmt: skip
        self.add(copy, tile.nbytes / self.machine.link.width, self.done[tile])
        return copy.whole

    def expression(self, node: Expression) -> None:
        home = node.home
        like = None if reduces(node.tree) else self.like(node)
        if like is not None:
            rows, columns = like.rows, like.columns
        else:
            rows = self.rows_like(node) or cut(home.rows, cuts.expression_parts(self.machine, node, self.effort))
            columns = [0, home.columns]
        tiles: list[list[Tile]] = []
        for i, (top, bottom) in enumerate(zip(rows[:-1], rows[1:], strict=True)):
            row: list[Tile] = []
            for j, (left, right) in enumerate(zip(columns[:-1], columns[1:], strict=True)):
                across = slice(None) if like is None else slice(left, right)
                blocks = [o[top:bottom, across] for o in node.operands]
                maps = [uniform(b) for b in blocks]
                if reduces(node.tree) and all(m.shape[1] == 1 for m in maps):  # a sum of what repeats itself
                    maps[0] = blocks[0]
                elements = (bottom - top) * (node.columns if like is None else right - left)
                cycles = durations.expression(self.machine, node.tree, elements)
                core, when = self.choose(maps, cycles)
                operands = [self.fetch(core, m, False) for m in maps]
                name = self.fresh(home, i, j, len(rows) - 1, len(columns) - 1)
                wide = right - left
                tree, operands = node.tree, operands
                tile = Computed(
                    name, home.dtype, bottom - top, wide, core, tree, operands, source=home.source, home=home.name
                )
                row.append(self.add(tile, cycles, when))
            tiles.append(row)
        self.blocks[home] = Blocks(rows, columns, tiles)

    def like(self, node: Expression) -> Blocks | None:
        """The tiles of an operand that lies as the result does."""
        for o in node.operands:
            if o.shape == (node.home.rows, node.home.columns) and o.size:
                home = self.graph.home_at(int(o[0, 0]))
                same = (home.rows, home.columns) == o.shape and int(o[0, 0]) == home.base
                if same and home in self.blocks and int(o[-1, -1]) - int(o[0, 0]) == o.size - 1 and _counts(o):
                    return self.blocks[home]
        return None

    def rows_like(self, node: Expression) -> list[int] | None:
        """The rows of an operand's tiles, where it lies in whole rows."""
        for o in node.operands:
            if o.shape[0] == node.home.rows and o.size:
                home = self.graph.home_at(int(o[0, 0]))
                blocks = self.blocks.get(home)
                if blocks is not None and home.rows == o.shape[0] and len(blocks.columns) == 2 and _counts(o):
                    enough = len(blocks.rows) - 1 >= cuts.expression_parts(self.machine, node, self.effort)
                    return blocks.rows if enough else None
        return None

    def gather(self, node: Gather) -> None:
        """Rows of a table, whose columns are spread over cores."""
        home, table = node.home, node.table
        least = int(np.ceil(table.size * home.dtype.itemsize / max(self.effort.tile_bytes, 1)))
        parts = max(least, min(self.effort.cores, home.columns * home.dtype.itemsize // self.machine.sram.width))
        columns = cut(home.columns, min(parts, home.columns))
        row: list[Tile] = []
        index = node.index
        for j, (left, right) in enumerate(zip(columns[:-1], columns[1:], strict=True)):
            cycles = home.rows * (right - left) * home.dtype.itemsize / self.machine.sram.width
            core, when = self.choose([table[:, left:right], index], cycles)
            read = self.whole(self.fetch(core, table[:, left:right], False)), self.whole(self.fetch(core, index, False))
            name = self.fresh(home, 0, j, 1, len(columns) - 1)
            tile = Gathered(name, home.dtype, home.rows, right - left, core, *read, source=home.source, home=home.name)
            row.append(self.add(tile, cycles, when))
        self.blocks[home] = Blocks([0, home.rows], columns, [row])

    def state(self, node: Constant) -> None:
        """What is kept between runs: its columns are spread over cores, a group of them at a time."""
        home, grain = node.home, node.grain
        columns = cut(home.columns, min(self.effort.cores, max(1, home.columns // grain)), grain)
        self.tensors[home.name] = node.data
        row: list[Tile] = []
        for left, right in zip(columns[:-1], columns[1:], strict=True):
            emptiest = int(np.argmin(self.held_bytes))
            row.append(self.held(self.cores[emptiest], home.name, (0, home.rows, left, right), True))
        self.blocks[home] = Blocks([0, home.rows], columns, [row])

    def scatter(self, node: Scatter) -> None:
        """Rows written in place, on each core that holds some of the columns."""
        home, before = node.home, self.blocks[node.state]
        if not self.machine.copy.engines:
            raise MapError(f"{self.machine.key} has no copy engine, which writes rows: called at {home.source}")
        row: list[Tile] = []
        for j, tile in enumerate(before.tiles[0]):
            left, right = before.columns[j], before.columns[j + 1]
            index = self.whole(self.fetch(tile.core, node.index, False))
            values = self.fetch(tile.core, node.rows[:, left:right], False)
            name = self.fresh(home, 0, j, 1, len(before.columns) - 1)
            after = Scattered(name, home.dtype, tile.rows, tile.columns, tile.core, tile.whole, index, values,
                              source=home.source, home=home.name)  # fmt: skip
            when = max(self.done[index.tile], self.done[values.tile])
            row.append(self.add(after, values.nbytes / self.machine.sram.width, when))
        self.blocks[home] = Blocks(before.rows, before.columns, [row])

    def whole(self, part: Part) -> Part:
        """A part as a tile of its own: rows are chosen by a whole tile, in a whole tile."""
        if part.is_whole:
            return part
        return self.assembled(part.tile.core, [(part, 0, 0)], *part.shape, part.tile.dtype).whole

    def output(self, name: str, dtype: torch.dtype, index: np.ndarray) -> None:
        """Pieces of the output, each by way of a core with a host port."""
        rows = cut(index.shape[0], cuts.block_parts(*index.shape, dtype.itemsize, self.effort))
        count = 0
        for top, bottom in zip(rows[:-1], rows[1:], strict=True):
            block = np.ascontiguousarray(index[top:bottom])
            for p in pieces(block, self.graph):
                for box in self.split(p):
                    core = self.hosts[count % len(self.hosts)]
                    count += 1
                    a, b, c, d = box
                    part = self.fetch(core, block[a:b, c:d], False)
                    self.given.append(Given(name, (top + a, top + b, c, d), part))

    def split(self, p: Piece) -> list[Box]:
        """A piece of a map where its home's tiles end."""
        if p.home is None or p.home not in self.blocks:
            return [(p.row, p.row + p.height, p.column, p.column + p.width)]
        found = []
        for part, row, column in self.blocks[p.home].parts(p.home_box, p.turned):
            height, width = part.shape
            found.append((p.row + row, p.row + row + height, p.column + column, p.column + column + width))
        return found

    # --- where, and what comes there ---

    def choose(self, maps: list[np.ndarray], cycles: float) -> tuple[Core, float]:
        """The core on which a tile would be done first, and when it could begin there."""
        start = self.ready.copy()
        incoming = np.zeros(len(self.cores))
        extra = np.zeros(len(self.cores))
        width = self.machine.link.width
        for index in maps:
            for tile, nbytes in self.reads(index):
                if tile is None:
                    extra += nbytes
                    continue
                here = self.number[tile.core]
                away = np.full(len(self.cores), nbytes / width)
                away[here] = 0
                incoming += away
                start = np.maximum(start, self.done[tile] + self.hops[here] + away)
        cost = np.maximum(start, self.ready + incoming) + cycles
        full = self.held_bytes + extra > self.machine.sram.size * 0.9
        if full.all():
            need, has = int((self.held_bytes + extra).min()), self.machine.sram.size
            raise SpaceError(f"weights need {need:,} of {has:,} bytes on the emptiest core of {self.machine.key}")
        cost = np.where(full, np.inf, cost)
        if self.effort.seed:
            cost = cost * np.array([1 + 0.05 * self.random.random() for _ in self.cores])
        best = int(np.argmin(cost))
        return self.cores[best], float(max(start[best], self.ready[best] + incoming[best]))

    def reads(self, index: np.ndarray) -> list[tuple[Tile | None, int]]:
        """The tiles under a map and how much of each; None for weights."""
        found: dict[Tile | None, int] = {}
        for p in self.pieces(index):
            size = p.height * p.width
            if p.home is None or p.home in self.constants:
                width = p.home.dtype.itemsize if p.home is not None else 1
                found[None] = found.get(None, 0) + size * width
                continue
            for part, _, _ in self.blocks[p.home].parts(p.home_box, p.turned):
                found[part.tile] = found.get(part.tile, 0) + part.nbytes
        return list(found.items())

    def fetch(self, core: Core, index: np.ndarray, turned: bool) -> Part:
        """What a map says, on a core: where it lies there already, a part of that; otherwise a new tile."""
        found = self.pieces(index)
        key = (core, tuple(found), turned)
        if key not in self.fetched:
            self.fetched[key] = self.fetch_anew(core, index, found, turned)
        return self.fetched[key]

    def pieces(self, index: np.ndarray) -> list[Piece]:
        """The rectangles of a map; of those that were looked at last, what was found then."""
        for other, found in self.looked_at:
            if other is index:
                return found
        found = pieces(index, self.graph)
        self.looked_at.append((index, found))
        return found

    def fetch_anew(self, core: Core, index: np.ndarray, found: list[Piece], turned: bool) -> Part:
        if all(p.home is None or p.home in self.constants for p in found):
            return self.hold(core, index, found, turned)
        moves: list[tuple[Part, int, int]] = []
        dtype = next(p.home for p in found if p.home is not None and p.home not in self.constants).dtype
        for p in found:
            if p.home is None or p.home in self.constants:
                block = index[p.row : p.row + p.height, p.column : p.column + p.width]
                moves.append((self.hold(core, block, pieces(block, self.graph), False, dtype), p.row, p.column))
                continue
            for part, row, column in self.blocks[p.home].parts(p.home_box, p.turned):
                moves.append((part, p.row + row, p.column + column))
        if len(moves) == 1 and moves[0][0].tile.core == core and (turned or not moves[0][0].turned):
            return moves[0][0]
        if len(moves) == 1 and moves[0][0].turned and turned:  # sent as it lies, read turned
            part = moves[0][0]
            lies = Part(part.tile, part.box)
            return Part(
                self.assembled(core, [(lies, 0, 0)], *lies.shape, dtype), (0, lies.shape[0], 0, lies.shape[1]), True
            )
        if any(part.turned and part.tile.core != core for part, _, _ in moves):
            moves = [
                (self.upright(part) if part.turned and part.tile.core != core else part, r, c) for part, r, c in moves
            ]
        return self.assembled(core, moves, *index.shape, dtype).whole

    def upright(self, part: Part) -> Part:
        """A part turned on its own core, before it is sent."""
        key = ("turned", part.tile, part.box)
        if key not in self.fetched:
            self.fetched[key] = self.assembled(part.tile.core, [(part, 0, 0)], *part.shape, part.tile.dtype).whole
        return self.fetched[key]

    def assembled(
        self, core: Core, moves: list[tuple[Part, int, int]], rows: int, columns: int, dtype: torch.dtype
    ) -> Tile:
        first = moves[0][0].tile
        name = self.graph.fresh(f"{first.home or first.name}_at")
        tile = Assembled(name, dtype, rows, columns, core, moves, source=first.source, home=first.home)
        when = max(self.done.get(part.tile, 0.0) for part, _, _ in moves)
        cycles = sum(part.nbytes for part, _, _ in moves) / self.machine.link.width
        return self.add(tile, cycles, when)

    def hold(
        self, core: Core, index: np.ndarray, found: list[Piece], turned: bool, dtype: torch.dtype | None = None
    ) -> Part:
        """Weights as a tile reads them, arranged ahead of time."""
        if len(found) == 1 and found[0].home is not None and (turned or not found[0].turned):
            home = found[0].home
            name, box = home.name, found[0].home_box
            self.tensors.setdefault(name, self.constants[home].data)
            if found[0].turned:
                key = (core, "held", name, box)
                if key not in self.fetched:
                    self.fetched[key] = self.held(core, name, box).whole
                part = self.fetched[key]
                return Part(part.tile, part.box, True)
        else:
            data, first = self.arranged(index, found, dtype)
            key = ("arranged", tuple(found))
            if key not in self.fetched:
                name = self.graph.fresh(f"{first}_arranged")
                self.tensors[name] = data
                self.fetched[key] = name  # type: ignore[assignment]
            name, box = self.fetched[key], (0, index.shape[0], 0, index.shape[1])  # type: ignore[assignment]
        return self.held(core, name, box).whole

    def held(self, core: Core, name: str, box: Box, state: bool = False) -> Tile:
        tensor, rows, columns = self.tensors[name], box[1] - box[0], box[3] - box[2]
        tile = Held(self.graph.fresh(name), tensor.dtype, rows, columns, core, name, box, state, home=name)
        self.held_bytes[self.number[core]] += tile.nbytes
        return self.add(tile, 0.0, 0.0)

    def arranged(self, index: np.ndarray, found: list[Piece], dtype: torch.dtype | None) -> tuple[torch.Tensor, str]:
        home = next((p.home for p in found if p.home is not None), None)
        kind = home.dtype if home is not None else dtype or torch.float32
        out = torch.zeros(index.shape, dtype=kind)
        for p in found:
            if p.home is not None:
                top, bottom, left, right = p.home_box
                block = self.constants[p.home].data[top:bottom, left:right]
                out[p.row : p.row + p.height, p.column : p.column + p.width] = block.t() if p.turned else block
        return out, home.name if home is not None else "zeros"

    def add(self, tile: Tile, cycles: float, when: float) -> Tile:
        self.tiles.append(tile)
        number = self.number[tile.core]
        if isinstance(tile, Held):
            self.done[tile] = 0.0
            return tile
        self.ready[number] = self.done[tile] = max(self.ready[number], when) + cycles
        return tile

    def fresh(self, home: Home, i: int, j: int, rows: int, columns: int) -> str:
        """`up`, or `up_2_0` where there are several blocks."""
        name = home.name + (f"_{i}" if rows > 1 else "") + (f"_{j}" if columns > 1 else "")
        return name if rows * columns == 1 else self.graph.fresh(name)


def _counts(index: np.ndarray) -> bool:
    """Numbers one after the other, row by row."""
    flat = index.reshape(-1)
    return bool((flat[1:] - flat[:-1] == 1).all())
