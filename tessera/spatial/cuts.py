"""How nodes are cut into blocks: by rows, by columns, and for products along what is summed.

In: a node, the machine, and what a tile may hold at most. Out: boundaries. A product's cut is the cheapest of all
grids that give each core something to do: cycles of the array, and bytes that come to a core.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tessera.machines.spatial import SpatialMachine
from tessera.spatial import durations
from tessera.spatial.graph import Expression, Product

PARTS = 8  # of a long sum, at most
FILL = 1.1  # how much longer its parts may take than the whole


@dataclass(frozen=True)
class Effort:
    """What a mapping may do; the search varies it."""

    cores: int  # how many a node is spread over at most
    tile_bytes: int  # a tile's operands and result together
    replicas: float = 1.0  # how often a weight may lie in memory
    window: int = 0  # instructions between the oldest unfinished one and the next; 0: any number
    regions: int = 4  # of whole banks, which buffers keep to, at most
    waves: int = 1  # tiles of a node that a core takes one after the other, where they are not too large
    arranged: bool = True  # products by weights that take all cores are laid over them as a grid
    stay: float = 1.0  # how much a cycle of what must come to a core weighs against waiting for another core
    resident: float = math.inf  # the part of memory that weights may take; the others come from off-chip memory
    seed: int = 0


def cut(total: int, parts: int, grain: int = 1) -> list[int]:
    """Boundaries of about equal parts, at multiples of `grain` where there is enough."""
    parts = max(1, min(parts, total))
    if total < parts * grain:
        grain = 1
    units = math.ceil(total / grain)
    parts = min(parts, units)
    bounds = [min(total, (i * units // parts) * grain) for i in range(parts)]
    return [*bounds, total]


def sizes(total: int) -> list[int]:
    """Numbers of parts worth trying."""
    powers = [1 << i for i in range(max(total, 1).bit_length()) if 1 << i <= total]
    return sorted({*powers, total, *(3 * p for p in powers if 3 * p <= total)})


@dataclass(frozen=True)
class Grid:
    """A product's cut: rows of each of a batch, columns, and parts of the sum."""

    rows: int
    columns: int
    depth: int


def product_grid(machine: SpatialMachine, node: Product, effort: Effort, constant: bool) -> Grid:
    """The cheapest grid whose tiles are small enough; where none is, the one with the smallest tiles."""
    ranked = [(_grid_cost(machine, node, effort, constant, grid), grid) for grid in _grids(node, effort)]
    return min(ranked, key=lambda pair: pair[0])[1]


def _grids(node: Product, effort: Effort) -> Iterator[Grid]:
    batch, m, k = node.x.shape
    for rows in sizes(m):
        for columns in sizes(node.w.shape[2]):
            tiles = batch * rows * columns
            yield Grid(rows, columns, 1)
            for depth in (2, 4, 8, 16):
                if depth <= k and tiles * depth <= effort.cores:
                    yield Grid(rows, columns, depth)


def copies(grid: Grid, effort: Effort) -> int:
    """On how many cores each block of a weight lies: rows are spread over them."""
    return max(1, min(grid.rows, effort.cores // (grid.columns * grid.depth), int(effort.replicas)))


def _grid_cost(
    machine: SpatialMachine, node: Product, effort: Effort, constant: bool, grid: Grid
) -> tuple[float, float]:
    """How far tiles are too large, then a core's cycles: while the array works on a tile, the next one arrives."""
    batch, m, k = node.x.shape
    size, wide, width = node.dtype.itemsize, node.home.dtype.itemsize, machine.link.width
    a, b, c = math.ceil(m / grid.rows), math.ceil(k / grid.depth), math.ceil(node.w.shape[2] / grid.columns)
    tiles = batch * grid.rows * grid.columns * grid.depth
    used = min(effort.cores, grid.columns * grid.depth * copies(grid, effort)) if constant else effort.cores
    # Arrays of a core work side by side on tiles that share neither rows nor columns.
    at_once = min(machine.matrix.count, batch * grid.rows, grid.columns * grid.depth)
    each = math.ceil(tiles / used / at_once)
    arrives = a * b * size + (0 if constant else b * c * size)
    parts = sum_parts(machine, effort, node, (a, b, c), constant)
    kept = arrives / parts * min(each * parts, 2) + a * c * wide  # the next part arrives while one is read
    excess = max(0, kept - effort.tile_bytes) / effort.tile_bytes
    array = tile_cycles(machine, a, b, c, node, size) + 8
    link = math.ceil(arrives / width)
    # Parts of a sum come to one core, which adds them.
    summed = (grid.depth - 1) * a * c * (wide / width + 1 / machine.vector.lanes) * math.ceil(each / grid.depth)
    cycles = each * max(array, link) + min(array, link) + a * c * wide / width + summed
    more = max(0, each - effort.waves)
    rows = 1.25 if grid.columns > 1 and not constant else 1.0  # what reads rows wants them whole
    return excess, cycles * rows * (1 + 0.2 * more)


def tile_cycles(machine: SpatialMachine, m: int, k: int, n: int, node: Product, size: int) -> int:
    cycles = durations.product(machine, m, k, n, node.dtype)
    reads, writes = durations.product_bytes(machine, m, k, n, size), m * n * node.home.dtype.itemsize
    return max(cycles, durations.traffic(machine, reads, writes, machine.sram.read_ports, machine.sram.write_ports))


def sum_parts(
    machine: SpatialMachine, effort: Effort, node: Product, size: tuple[int, int, int], constant: bool
) -> int:
    """In how many instructions a sum is taken: few enough that filling the array does not count, and that each waits
    for much; where weights are streamed, as many as it takes that two parts of what arrives find room."""
    m, k, n = size
    whole, parts = durations.product(machine, m, k, n, node.dtype), most_sum_parts(machine, k)
    while parts * durations.product(machine, m, math.ceil(k / parts), n, node.dtype) > FILL * whole:
        parts -= 1
    if math.isinf(effort.resident):
        return parts
    arrives = k * (m if constant else m + n) * node.dtype.itemsize
    room = max(1, effort.tile_bytes - m * n * node.home.dtype.itemsize)
    return max(parts, min(k // machine.matrix.rows, math.ceil(2 * arrives / room)))


def most_sum_parts(machine: SpatialMachine, k: int) -> int:
    return max(1, min(PARTS, k // (8 * machine.matrix.rows)))


def expression_parts(machine: SpatialMachine, node: Expression, effort: Effort) -> int:
    """Blocks of rows: one an array where there is enough to do, more where a tile would be too large."""
    rows, columns = node.home.rows, node.columns
    size = max(node.home.dtype.itemsize, 4) * (1 + len(node.operands))
    least = math.ceil(rows * columns * size / effort.tile_bytes)
    useful = max(1, rows * columns // (4 * machine.vector.lanes))
    return min(rows, max(least, min(effort.cores * machine.matrix.count, useful)))


def block_parts(machine: SpatialMachine, rows: int, columns: int, itemsize: int, effort: Effort) -> int:
    """Blocks of rows of what comes from the host or goes there."""
    least = math.ceil(rows * columns * itemsize / max(effort.tile_bytes // 4, 1))
    worth = max(1, rows * columns * itemsize // 1024)
    return min(rows, max(least, min(effort.cores * machine.matrix.count, worth)))
