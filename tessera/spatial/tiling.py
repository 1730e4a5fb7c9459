"""From homes to tiles, each on a core.

In: a graph, a machine, and what the mapping may do. Out: a program of tiles. Nodes are cut one after the other
(`cuts`), and each tile goes to the core where it would be done first (`placement`). A product by weights that takes
all cores is laid over them as a grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch

from tessera.ir.equation import NOWHERE, Source
from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial import cuts, durations
from tessera.spatial.cuts import Effort, cut
from tessera.spatial.errors import MapError
from tessera.spatial.graph import (
    Apply,
    Constant,
    Expression,
    Gather,
    Graph,
    HostCall,
    Hosted,
    Input,
    Leave,
    Left,
    Node,
    Product,
    Scatter,
    Tree,
    reduces,
)
from tessera.spatial.listing.types import Hosted as HostAction
from tessera.spatial.maps import Home, Map
from tessera.spatial.placement import HOP, Blocks, Placement
from tessera.spatial.rectangles import Rectangle
from tessera.spatial.routes import Routes
from tessera.spatial.streams import streamed
from tessera.spatial.tiles import (
    Assembled,
    Box,
    Called,
    Computed,
    Gathered,
    Given,
    Held,
    Kept,
    Multiplied,
    Part,
    Received,
    Scattered,
    Tile,
    Tiles,
)


class Tiling:
    def __init__(self, graph: Graph, machine: SpatialMachine, routes: Routes, effort: Effort) -> None:
        self.graph, self.machine, self.effort = graph, machine, effort
        self.on = Placement(graph, machine, routes, effort)
        self.given: list[Given] = []
        self.calls: list[Called] = []
        self.hosted: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        self.asked: set[HostCall] = set()
        self.given_cycles: dict[Core, float] = {}  # of host ports
        self.factors: dict[tuple, Map] = {}  # blocks of products' maps
        self.grids: dict[tuple, cuts.Grid] = {}  # of products of these sizes
        self.spans: dict[tuple, tuple[int, list[int]]] = {}  # of their tiles: cycles, and the parts of the sum
        self.kept: dict[tuple[int | None, str], Blocks] = {}  # what stays between parts of a program, by chip and name

    def run(self) -> Tiles:
        if not math.isinf(self.effort.resident):
            self.on.streamed = streamed(self.graph, self.machine)
        for node in self.graph.nodes:
            self.node(node)
        for name, dtype, _, m in self.graph.outputs:
            self.output(name, dtype, m)
        inputs = [(name, dtype, shape) for name, dtype, shape, _ in self.graph.inputs]
        outputs = [(name, dtype, shape) for name, dtype, shape, _ in self.graph.outputs]
        return Tiles(
            self.graph.name, self.on.tiles, self.given, self.on.tensors, inputs, outputs, self.calls, self.hosted
        )

    def node(self, node: Node) -> None:
        self.on.on_chip(node.chip)
        self.on.batch = node.place.batch
        self.on.turn += 1
        match node:
            case Constant():
                if node.state:
                    self.state(node)
                else:
                    self.on.constants[node.home] = node
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
            case Hosted():
                self.call(node)
            case Left():
                self.left(node)
            case Leave():
                self.leave(node)

    # --- nodes ---

    def input(self, node: Input) -> None:
        self.received(node.home, node.tensor, node.first)

    def received(self, home: Home, tensor: str, first: int, source: Source = NOWHERE) -> None:
        """What the host sends, by its ports in turn."""
        rows = cut(home.rows, cuts.block_parts(self.machine, home.rows, home.columns, home.dtype.itemsize, self.effort))
        columns = cut(home.columns, cuts.most_sum_parts(self.machine, home.columns) if self.is_factor(home) else 1,
                      self.machine.matrix.rows)  # fmt: skip
        grid: list[list[Tile]] = []
        for i, (top, bottom) in enumerate(zip(rows[:-1], rows[1:], strict=True)):
            core = self.on.hosts[i % len(self.on.hosts)]
            line: list[Tile] = []
            for j, (left, right) in enumerate(zip(columns[:-1], columns[1:], strict=True)):
                name = self.on.fresh(home, i, j, len(rows) - 1, len(columns) - 1)
                box = (first + top, first + bottom, left, right)
                tile = Received(name, home.dtype, bottom - top, right - left, core, tensor, box, home=home.name,
                                source=source)  # fmt: skip
                line.append(self.on.add(tile, "host", tile.nbytes / self.machine.host.width, 0.0))  # type: ignore[union-attr]
            grid.append(line)
        self.on.blocks[home] = Blocks(rows, columns, grid)

    def call(self, node: Hosted) -> None:
        """A result of an operator at the host: what that reads goes there once, then it comes as an input does."""
        call = node.call
        if call not in self.asked:
            self.asked.add(call)
            wanted = {n.number: n for n in self.graph.nodes if isinstance(n, Hosted) and n.call is call}
            names = tuple(wanted[i].home.name if i in wanted else "_" for i in range(call.results))
            self.calls.append(Called(HostAction(names, call.op, call.arguments), self.on.hosts[0], call.source))
            self.hosted += [(n.home.name, n.home.dtype, n.shape) for n in wanted.values()]
            for name, (dtype, shape, m) in call.operands.items():
                if (name, dtype, shape) not in self.hosted:
                    self.hosted.append((name, dtype, shape))
                    self.output(name, dtype, m)
            self.on.on_chip(node.chip)
        self.received(node.home, node.home.name, 0, call.source)

    def is_factor(self, home: Home) -> bool:
        """Only products read it, row by row: the columns that a sum begins with may come first."""
        readers = [node for node in self.graph.nodes if any(home in m.homes for m in node.maps)]
        whole = (home.rows, home.columns)
        return all(isinstance(node, Product) and node.x.only is home and node.x.shape[1:] == whole for node in readers)

    def product(self, node: Product) -> None:
        home, machine = node.home, self.machine
        durations.check_type(machine, node)
        batch, m, k = node.x.shape
        n = node.w.shape[2]
        constant = self.is_constant(node)
        grid = self.grid(node, constant)
        inner = cut(m, grid.rows, machine.matrix.rows if machine.matrix.stationary == "output" else 1)
        rows = [b * m + r for b in range(batch) for r in inner[:-1]] + [batch * m]
        columns = cut(n, grid.columns, machine.matrix.columns if machine.matrix.stationary != "input" else 1)
        depth = cut(k, grid.depth, machine.matrix.rows if machine.matrix.stationary != "output" else 1)
        copies = cuts.copies(grid, self.effort) if constant else 0
        places = self.places(grid, copies, batch)
        done: dict[tuple[int, int], Tile] = {}
        for i, j in self.product_order(node, len(rows) - 1, len(columns) - 1):
            (top, bottom), (left, right) = rows[i : i + 2], columns[j : j + 2]
            b, r = divmod(top, m)
            name = self.on.fresh(home, i, j, len(rows) - 1, len(columns) - 1)
            spans = list(itertools.pairwise(depth))
            partial = [
                self.multiplied(
                    node, name if len(spans) == 1 else self.graph.fresh(f"{name}_k{s}"),
                    self.matrix(node.x, b, (r, r + bottom - top), (lo, hi)),
                    self.matrix(node.w, b, (lo, hi), (left, right)),
                    copies, places(i, s, j) if places is not None else None,
                )
                for s, (lo, hi) in enumerate(spans)
            ]  # fmt: skip
            done[i, j] = partial[0] if len(partial) == 1 else self.summed(node, name, partial)
        tiles = [[done[i, j] for j in range(len(columns) - 1)] for i in range(len(rows) - 1)]
        self.on.blocks[home] = Blocks(rows, columns, tiles)

    def grid(self, node: Product, constant: bool) -> cuts.Grid:
        """Chips share a product in parts of one size, and layers have the same sizes."""
        key = (node.x.shape, node.w.shape, node.dtype, node.home.dtype, constant)
        if key not in self.grids:
            self.grids[key] = cuts.product_grid(self.machine, node, self.effort, constant)
        return self.grids[key]

    def span(self, node: Product, m: int, k: int, n: int) -> tuple[int, list[int]]:
        """Cycles of a tile, and where its sum is cut."""
        constant = self.is_constant(node)
        key = (m, k, n, node.dtype, node.home.dtype, constant)
        if key not in self.spans:
            parts = cuts.sum_parts(self.machine, self.effort, node, (m, k, n), constant)
            cycles = cuts.tile_cycles(self.machine, m, k, n, node, node.dtype.itemsize)
            self.spans[key] = cycles, cut(k, parts, self.machine.matrix.rows)
        return self.spans[key]

    def is_constant(self, node: Product) -> bool:
        """Its weights lie in memory."""
        return all(h in self.on.constants for h in node.w.homes) and not self.on.is_streamed(node.w)

    def product_order(self, node: Product, rows: int, columns: int) -> list[tuple[int, int]]:
        """Row by row; but column by column where weights are streamed: all rows read each, then it goes."""
        if self.on.is_streamed(node.w):
            return [(i, j) for j in range(columns) for i in range(rows)]
        return [(i, j) for i in range(rows) for j in range(columns)]

    def matrix(self, m: Map, number: int, rows: tuple[int, int], columns: tuple[int, int]) -> Map:
        """A block of a factor; several tiles read the same."""
        key = (id(m), number, rows, columns)
        if key not in self.factors:
            self.factors[key] = m.matrix(number, rows, columns)
        return self.factors[key]

    def places(self, grid: cuts.Grid, copies: int, batch: int) -> Callable[[int, int, int], Core] | None:
        """Where tiles lie if a product takes all cores: those that read the same rows stand side by side."""
        cores = self.on.cores
        rows, columns, depth = batch * grid.rows, grid.columns, grid.depth
        if not self.effort.arranged:
            return None
        if copies:
            if copies * columns * depth != len(cores):
                return None
            return lambda i, s, j: cores[((i % copies) * depth + s) * columns + j]
        tiles = rows * columns * depth
        return lambda i, s, j: cores[((i * depth + s) * columns + j) * len(cores) // tiles]

    def multiplied(self, node: Product, name: str, x: Map, w: Map, copies: int, at: Core | None) -> Tile:
        """A tile of a product; a long sum is taken in parts, each as soon as what it reads is there."""
        (m, k), n = x.shape, w.shape[1]
        cycles, bounds = self.span(node, m, k, n)
        core, when = self.on.choose([x, w], cycles, "matrix", copies, at)
        factors = []
        for low, high in zip(bounds[:-1], bounds[1:], strict=True):
            parts = (x.block((0, m), (low, high)), w.block((low, high), (0, n))) if len(bounds) > 2 else (x, w)
            factors.append(tuple(self.on.fetch(core, part, True, node.dtype) for part in parts))
        self.on.note(core, x, w)
        tile = Multiplied(name, node.home.dtype, m, n, core, factors, source=node.home.source, home=node.home.name)
        return self.on.add(tile, "matrix", cycles, when)

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
        return self.on.add(
            tile,
            "vector",
            durations.expression(self.machine, tree, first.rows * first.columns),
            max(map(self.on.done.__getitem__, partial)),
        )

    def brought(self, core: Core, tile: Tile) -> Part:
        if tile.core == core:
            return tile.whole
        copy = Assembled(self.graph.fresh(f"{tile.name}_at"), tile.dtype, tile.rows, tile.columns, core,
                         [(tile.whole, 0, 0)], source=tile.source, home=tile.home)  # fmt: skip
        self.on.add(copy, "link", tile.nbytes / self.machine.link.width, self.on.done[tile])
        return copy.whole

    def expression(self, node: Expression) -> None:
        home = node.home
        like = None if reduces(node.tree) else self.like(node)
        if like is not None:
            rows, columns = like.rows, like.columns
        else:
            rows = self.rows_like(node) or cut(home.rows, cuts.expression_parts(self.machine, node, self.effort))
            columns = [0, home.columns]
        blocks_in_all = (len(rows) - 1) * (len(columns) - 1)
        tiles: list[list[Tile]] = []
        for i, (top, bottom) in enumerate(zip(rows[:-1], rows[1:], strict=True)):
            row: list[Tile] = []
            for j, (left, right) in enumerate(zip(columns[:-1], columns[1:], strict=True)):
                blocks = [
                    o.block((top, bottom), (0, o.shape[1]) if like is None else (left, right)) for o in node.operands
                ]
                maps = [b.uniform() for b in blocks]
                if reduces(node.tree) and all(m.shape[1] == 1 for m in maps):  # a sum of what repeats itself
                    maps[0] = blocks[0]
                elements = (bottom - top) * (node.columns if like is None else right - left)
                cycles = durations.expression(self.machine, node.tree, elements)
                wanted = self.on.cores[(i * (len(columns) - 1) + j) * len(self.on.cores) // blocks_in_all]
                core, when = self.on.choose(maps, cycles, "vector", at=self.on.stays(maps) or wanted)
                dtypes = [o.homes[0].dtype if o.homes else home.dtype for o in node.operands]
                operands = [self.on.fetch(core, m, False, of) for m, of in zip(maps, dtypes, strict=True)]
                name = self.on.fresh(home, i, j, len(rows) - 1, len(columns) - 1)
                wide = right - left
                tree, operands = node.tree, operands
                tile = Computed(
                    name, home.dtype, bottom - top, wide, core, tree, operands, source=home.source, home=home.name
                )
                row.append(self.on.add(tile, "vector", cycles, when))
            tiles.append(row)
        self.on.blocks[home] = Blocks(rows, columns, tiles)

    def like(self, node: Expression) -> Blocks | None:
        """The tiles of an operand that lies as the result does."""
        for o in node.operands:
            home = o.only if o.shape == (node.home.rows, node.home.columns) else None
            if home is not None and home in self.on.blocks and (home.rows, home.columns) == o.shape:
                return self.on.blocks[home]
        return None

    def rows_like(self, node: Expression) -> list[int] | None:
        """The rows of an operand's tiles, where it lies in whole rows."""
        for o in node.operands:
            home = o.only
            if home is None or (blocks := self.on.blocks.get(home)) is None:
                continue
            if home.rows == o.shape[0] == node.home.rows and len(blocks.columns) == 2:
                enough = len(blocks.rows) - 1 >= cuts.expression_parts(self.machine, node, self.effort)
                return blocks.rows if enough else None
        return None

    def gather(self, node: Gather) -> None:
        """Rows of a table, whose columns are spread over cores."""
        home, table = node.home, node.table
        least = int(np.ceil(table.size * home.dtype.itemsize / max(self.effort.tile_bytes, 1)))
        parts = max(least, min(self.effort.cores, home.columns * home.dtype.itemsize // self.machine.sram.width))
        if 2 * parts > (cores := len(self.on.cores)):  # a large table: as much of it on every core
            parts = -(-parts // cores) * cores
        columns = cut(home.columns, min(parts, home.columns))
        row: list[Tile] = []
        index = node.index
        for j, (left, right) in enumerate(zip(columns[:-1], columns[1:], strict=True)):
            cycles = home.rows * (right - left) * home.dtype.itemsize / self.machine.sram.width
            columns_of = table.block((0, table.shape[0]), (left, right))
            large = self.on.is_held(columns_of) and 16 * columns_of.size * home.dtype.itemsize > self.machine.sram.size
            core, when = self.on.choose([columns_of, index], cycles, "copy", at=self.on.emptiest() if large else None)
            read = (
                self.on.whole(self.on.fetch(core, columns_of, False, home.dtype)),
                self.on.whole(self.on.fetch(core, index, False, torch.int64)),
            )
            name = self.on.fresh(home, 0, j, 1, len(columns) - 1)
            tile = Gathered(name, home.dtype, home.rows, right - left, core, *read, source=home.source, home=home.name)
            row.append(self.on.add(tile, "copy", cycles, when))
        self.on.blocks[home] = Blocks([0, home.rows], columns, [row])

    def state(self, node: Constant) -> None:
        """What is kept between runs: its columns are spread over cores, a group of them at a time."""
        home, grain = node.home, node.grain
        columns = cut(home.columns, min(self.effort.cores, max(1, home.columns // grain)), grain)
        self.on.tensors[home.name] = node.data
        row: list[Tile] = []
        for left, right in zip(columns[:-1], columns[1:], strict=True):
            row.append(self.on.held(self.on.emptiest(), home.name, (0, home.rows, left, right), True))
        self.on.blocks[home] = Blocks([0, home.rows], columns, [row])

    def scatter(self, node: Scatter) -> None:
        """Rows written in place, on each core that holds some of the columns."""
        home, before = node.home, self.on.blocks[node.state]
        if not self.machine.copy.engines:
            raise MapError(f"{self.machine.key} has no copy engine, which writes rows: called at {home.source}")
        row: list[Tile] = []
        for j, tile in enumerate(before.tiles[0]):
            left, right = before.columns[j], before.columns[j + 1]
            index = self.on.whole(self.on.fetch(tile.core, node.index, False, torch.int64))
            rows = node.rows.block((0, node.rows.shape[0]), (left, right))
            values = self.on.fetch(tile.core, rows, False, home.dtype)
            name = self.on.fresh(home, 0, j, 1, len(before.columns) - 1)
            after = Scattered(name, home.dtype, tile.rows, tile.columns, tile.core, tile.whole, index, values,
                              source=home.source, home=home.name)  # fmt: skip
            when = max(self.on.done[index.tile], self.on.done[values.tile])
            row.append(self.on.add(after, "copy", values.nbytes / self.machine.sram.width, when))
        self.on.blocks[home] = Blocks(before.rows, before.columns, [row])

    def left(self, node: Left | Leave) -> Blocks:
        """What stays on a chip between parts of a program: whole rows, on the same cores in each of them."""
        home, cores = node.home, self.on.cores
        if (node.chip, home.name) not in self.kept:
            rows = cut(home.rows, len(cores))
            tiles: list[list[Tile]] = []
            for i, (top, bottom) in enumerate(zip(rows[:-1], rows[1:], strict=True)):
                box, core = (top, bottom, 0, home.columns), cores[i * len(cores) // (len(rows) - 1)]
                tile = Held(f"{home.name}_{i}", home.dtype, bottom - top, home.columns, core, "", box, True,
                            home=home.name)  # fmt: skip
                tiles.append([self.on.add(tile, "copy", 0.0, 0.0)])
            self.kept[node.chip, home.name] = Blocks(rows, [0, home.columns], tiles)
        self.on.blocks[home] = self.kept[node.chip, home.name]
        return self.on.blocks[home]

    def leave(self, node: Leave) -> None:
        blocks = self.left(node)
        for i, (top, bottom) in enumerate(zip(blocks.rows[:-1], blocks.rows[1:], strict=True)):
            tile = blocks.tiles[i][0]
            value = node.value.block((top, bottom), (0, node.home.columns))
            part = self.on.fetch(tile.core, value, False, tile.dtype)
            kept = Kept(tile.name, tile.dtype, tile.rows, tile.columns, tile.core, [(part, 0, 0)], tile, home=tile.home)
            self.on.add(kept, "copy", part.nbytes / self.machine.sram.width, self.on.done[part.tile])

    def output(self, name: str, dtype: torch.dtype, m: Map) -> None:
        """Pieces of the output, each by way of a core with a host port."""
        if not m.size:
            return
        rows = cut(m.shape[0], cuts.block_parts(self.machine, m.shape[0], m.shape[1], dtype.itemsize, self.effort))
        for top, bottom in zip(rows[:-1], rows[1:], strict=True):
            block = m.block((top, bottom), (0, m.shape[1]))
            for r in self.on.rectangles(block):
                for source, (a, b, c, d) in self.split(r):
                    self.on.on_chip(None if source is None else source.chip)
                    core = self.way_out(source, (b - a) * (d - c) * dtype.itemsize)
                    part = self.on.fetch(core, block.block((a, b), (c, d)), False, dtype)
                    self.given.append(Given(name, (top + a, top + b, c, d), part))

    def way_out(self, source: Core | None, nbytes: int) -> Core:
        """A core with a host port: near, and not one that much goes through already."""
        hosts = self.on.hosts
        far = np.zeros(len(hosts)) if source is None else self.on.routes.far_away(source, hosts)
        cycles = nbytes / self.machine.host.width  # type: ignore[union-attr]
        cost = [self.given_cycles.get(h, 0.0) + cycles * HOP * hops for h, hops in zip(hosts, far, strict=True)]
        core = hosts[int(np.argmin(cost))]
        self.given_cycles[core] = self.given_cycles.get(core, 0.0) + cycles
        return core

    def split(self, r: Rectangle) -> list[tuple[Core | None, Box]]:
        """A rectangle of a map where its home's tiles end, each with the core that it lies on."""
        if r.home is None or r.home not in self.on.blocks:
            return [(None, r.box)]
        boxes: list[tuple[Core | None, Box]] = []
        for part, row, column in self.on.blocks[r.home].parts(r.home_box, r.turned):
            height, width = part.shape
            box = (r.row + row, r.row + row + height, r.column + column, r.column + column + width)
            boxes.append((part.tile.core, box))
        return boxes
