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


@dataclass(frozen=True)
class Effort:
    """What a mapping may do; the search varies it."""

    cores: int  # how many a node is spread over at most
    tile_bytes: int  # a tile's operands and result together
    replicas: float = 1.0  # how often a weight may lie in memory
    window: int = 0  # instructions between the oldest unfinished one and the next; 0: any number
    banked: bool = True  # buffers keep to banks of their own
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


def _grid_cost(
    machine: SpatialMachine, node: Product, effort: Effort, constant: bool, grid: Grid
) -> tuple[float, float]:
    """How far tiles are too large, then a core's cycles for the array and for what comes to it."""
    batch, m, k = node.x.shape
    size, wide = node.dtype.itemsize, node.home.dtype.itemsize
    a, b, c = math.ceil(m / grid.rows), math.ceil(k / grid.depth), math.ceil(node.w.shape[2] / grid.columns)
    arrives = a * b * size + (0 if constant else b * c * size)
    arrives += a * c * wide * (grid.depth - 1)
    excess = max(0, arrives + a * c * wide - effort.tile_bytes) / effort.tile_bytes
    copies = min(grid.rows, math.ceil(effort.cores / grid.columns)) if constant else 1  # of the weights
    if copies > max(1.0, effort.replicas):
        excess += copies / effort.replicas
    waves = math.ceil(batch * grid.rows * grid.columns * grid.depth / effort.cores)
    cycles = waves * (_tile_cycles(machine, a, b, c, node, size) + math.ceil(arrives / machine.link.width) + 8)
    return excess, cycles * (1 + 0.02 * (copies - 1))


def _tile_cycles(machine: SpatialMachine, m: int, k: int, n: int, node: Product, size: int) -> int:
    cycles = durations.product(machine, m, k, n, node.dtype)
    reads, writes = durations.product_bytes(machine, m, k, n, size), m * n * node.home.dtype.itemsize
    return max(cycles, durations.traffic(machine, reads, writes, machine.sram.read_ports, machine.sram.write_ports))


def expression_parts(machine: SpatialMachine, node: Expression, effort: Effort) -> int:
    """Blocks of rows: one a core where there is enough to do, more where a tile would be too large."""
    rows, columns = node.home.rows, node.columns
    size = max(node.home.dtype.itemsize, 4) * (1 + len(node.operands))
    least = math.ceil(rows * columns * size / effort.tile_bytes)
    useful = max(1, rows * columns // (4 * machine.vector.lanes))
    return min(rows, max(least, min(effort.cores, useful)))


def block_parts(rows: int, columns: int, itemsize: int, effort: Effort) -> int:
    """Blocks of rows of what comes from the host or goes there."""
    least = math.ceil(rows * columns * itemsize / max(effort.tile_bytes // 4, 1))
    worth = max(1, rows * columns * itemsize // 1024)
    return min(rows, max(least, min(effort.cores, worth)))
