"""What a kernel must move and compute at given sizes, and how long a machine needs for that at best.

Bytes are those that a perfect cache would leave: every element that is touched is read or written once. Flops are
split into those of the matrix units and the rest. The roofline is the longer of moving and computing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from xdsl.ir import SSAValue

from tessera.machines import Machine
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
)
from tessera.tile.dialect.types import axes_of, element_of


@dataclass(frozen=True)
class Cost:
    read: int  # bytes
    written: int
    flops: int  # outside the matrix units
    matrix_flops: int

    @property
    def bytes(self) -> int:
        return self.read + self.written


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
    for buffer, accesses in touched.items():
        elements = sum(n for n, _ in accesses.values())
        extents = [e for _, e in accesses.values()]
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
