"""What a kernel must move and compute at given sizes, and how long a machine needs for that at best.

Bytes are those that a perfect cache would leave: every element that is touched is read or written once. Flops are
split into those of the matrix units and the rest. The roofline is the longer of moving and computing.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from xdsl.ir import SSAValue

from tessera.machines import Machine, machine
from tessera.machines.describe import Figure
from tessera.ops.uniform import COST as COST_OF_RANDOM
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.index import Index, Quotient
from tessera.tile.dialect.ops import (
    ApplyOp,
    ContractOp,
    KernelOp,
    LoadOp,
    RandomOp,
    ReduceExpOp,
    ReduceOp,
    ScanOp,
    StoreOp,
    axes_of,
    element_of,
)


@dataclass(frozen=True)
class Cost:
    read: int  # bytes
    written: int
    flops: int  # outside the matrix units
    matrix_flops: int

    @property
    def bytes(self) -> int:
        return self.read + self.written


H200 = machine("h200")


def axis_sizes(kernel: KernelOp, sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of positions of every axis, for these values of the symbols."""
    return {a.axis.data: a.size.expr.evaluate(sizes.__getitem__, int) for a in kernel.axes}


def cost(kernel: KernelOp, sizes: Mapping[str, int]) -> Cost:
    axes = axis_sizes(kernel, sizes)
    flops = matrix = 0
    for op in kernel.block.ops:
        match op:
            case ApplyOp():
                flops += FUNCTIONS[op.fn.data].cost * _points(axes, axes_of(op.result))
            case ReduceOp() | ScanOp():
                flops += _points(axes, axes_of(op.arg))
            case ReduceExpOp():
                flops += (2 + FUNCTIONS[op.fn.data].cost) * _points(axes, axes_of(op.arg))
            case RandomOp():
                flops += COST_OF_RANDOM * _points(axes, axes_of(op.result))
            case ContractOp():
                matrix += 2 * _points(axes, tuple({*axes_of(op.lhs), *axes_of(op.rhs)}))
    return Cost(_bytes(kernel, axes, sizes, LoadOp), _bytes(kernel, axes, sizes, StoreOp), flops, matrix)


def roofline(of: Cost, machine: Machine) -> float:
    """Seconds that the machine needs at best."""
    return max(of.bytes / machine.bandwidth, of.flops / machine.flops + of.matrix_flops / machine.matrix_flops)


def machine_for(device: torch.device | str) -> Machine:
    """The rates of a device: as described where they were measured on such a one, else measured here, once."""
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return H200 if "H200" in name else _measured(str(device), name)
    return _measured(str(device), "cpu")


def _points(axes: Mapping[str, int], names: tuple[str, ...]) -> int:
    return math.prod(axes[a] for a in names)


def _bytes(kernel: KernelOp, axes: Mapping[str, int], sizes: Mapping[str, int], kind: type) -> int:
    """Over the buffers, the elements that its accesses name, but never more than lie between first and last."""
    touched: dict[SSAValue, dict[str, tuple[int, int | None]]] = {}
    for op in kernel.block.ops:
        if not isinstance(op, kind):
            continue
        assert isinstance(op, (LoadOp, StoreOp))
        used = {a for v in op.indices for a in axes_of(v)} | (set(op.at.expr.names()) & set(axes))
        key = op.at.text.data if not op.indices else f"{op.at.text.data} of {id(op)}"
        extent = None if op.indices else 1 + _largest(op.at.expr, axes, sizes)
        touched.setdefault(op.buffer, {})[key] = (math.prod(axes[a] for a in used), extent)
    total = 0
    for buffer, found in touched.items():
        elements = sum(n for n, _ in found.values())
        extents = [e for _, e in found.values()]
        if None not in extents:
            elements = min(elements, max(e for e in extents if e is not None))
        total += elements * torch_dtype(element_of(buffer)).itemsize
    return total


def _largest(expr: Index, axes: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """An upper bound of an index expression."""
    total = 0
    for factors, c in expr.terms:
        part = c
        for atom in factors:
            if isinstance(atom, Quotient):
                left, right = _largest(atom.left, axes, sizes), max(_largest(atom.right, axes, sizes), 1)
                part *= min(left, right - 1) if atom.kind == "%" else left // right
            else:
                part *= max(axes[atom.name] - 1, 0) if atom.name in axes else sizes.get(atom.name, 0)
        total += max(part, 0)
    return total


@functools.cache
def _measured(device: str, name: str) -> Machine:
    """A copy larger than caches and a matrix product, timed for some tens of milliseconds."""
    cuda = torch.device(device).type == "cuda"
    n, m = (1 << 28, 4096) if cuda else (1 << 24, 512)
    a, b = torch.empty(n, dtype=torch.uint8, device=device), torch.empty(n, dtype=torch.uint8, device=device)
    x = torch.ones(m, m, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    copy, product = _seconds(lambda: b.copy_(a), cuda), _seconds(lambda: x @ x, cuda)
    matrix = 2 * m**3 / product
    units = torch.cuda.get_device_properties(device).multi_processor_count if cuda else torch.get_num_threads()
    rates = {"bandwidth": 2 * n / copy, "flops.float32": matrix / (12 if cuda else 1), "matrix.bfloat16": matrix}
    figures = {name: Figure(value, "measured here") for name, value in {"units": units, **rates}.items()}
    return Machine(device, name, "gpu" if cuda else "cpu", "", figures)


def _seconds(work, cuda: bool, turns: int = 5) -> float:
    best = math.inf
    for _ in range(turns):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
