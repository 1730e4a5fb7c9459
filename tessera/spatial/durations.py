"""How long instructions take, as docs/machine.md has it. The compiler's own account: the simulator has another."""

from __future__ import annotations

import math

import torch

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.errors import MapError
from tessera.spatial.graph import Product, Tree, functions


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def traffic(machine: SpatialMachine, read: int, written: int, reads: int, writes: int) -> int:
    """Cycles that so many bytes take through so many ports."""
    width = machine.sram.width
    cycles = [math.ceil(read / (reads * width)) if read else 0, math.ceil(written / (writes * width)) if written else 0]
    return max(1, *cycles)


def folds(machine: SpatialMachine, m: int, k: int, n: int) -> tuple[int, int]:
    """How often the array is filled, and what streams through it each time."""
    rows, columns = machine.matrix.rows, machine.matrix.columns
    match machine.matrix.stationary:
        case "weight":
            return math.ceil(k / rows) * math.ceil(n / columns), m
        case "input":
            return math.ceil(k / rows) * math.ceil(m / columns), n
        case _:
            return math.ceil(m / rows) * math.ceil(n / columns), k


def check_type(machine: SpatialMachine, node: Product) -> None:
    if dtype_name(node.dtype) not in machine.matrix.passes:
        known = ", ".join(machine.matrix.passes)
        raise MapError(f"{machine.key}'s array multiplies {known}, not {node.dtype}: called at {node.home.source}")


def product(machine: SpatialMachine, m: int, k: int, n: int, dtype: torch.dtype) -> int:
    """Cycles that an array takes, whatever the ports do."""
    rows, columns = machine.matrix.rows, machine.matrix.columns
    count, stream = folds(machine, m, k, n)
    load = 0 if machine.matrix.stationary == "output" else rows  # a stationary output has nothing to load
    fill = load + rows + columns + stream - 2
    if machine.matrix.loading == "serial":
        cycles = count * fill
    else:
        cycles = fill + (count - 1) * max(stream, rows)
    return math.ceil(cycles * machine.matrix.passes[dtype_name(dtype)])


def product_bytes(machine: SpatialMachine, m: int, k: int, n: int, size: int) -> int:
    """Bytes that a product reads, without what it adds to."""
    rows, columns = machine.matrix.rows, machine.matrix.columns
    x, w = m * k * size, k * n * size
    match machine.matrix.stationary:
        case "weight":
            return w + x * math.ceil(n / columns)
        case "input":
            return x + w * math.ceil(m / columns)
        case _:
            return x * math.ceil(n / columns) + w * math.ceil(m / rows)


def expression(machine: SpatialMachine, tree: Tree, elements: int) -> int:
    """Cycles of the vector unit. One without a function is a `move`."""
    names = list(functions(tree))
    cycles = sum(machine.vector.cycles_of(fn) for fn in names) if names else machine.vector.cycles_of("move")
    return max(1, math.ceil(math.ceil(elements / machine.vector.lanes) * cycles))
