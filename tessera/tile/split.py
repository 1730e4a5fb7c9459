"""One reduction shared by many programs: a kernel becomes two, without atomic additions, so results repeat bit by bit.

    before:  y[j] = f(sum over r < n of x[r, j])
    -->
    first:   scratch[part, j] = sum over r < n / parts of x[part * (n / parts) + r, j]
    second:  y[j] = f(sum over part of scratch[part, j])

It is for reductions with few results and a long axis: columns, whole tensors, small products over a deep axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import Attribute, Operation

from tessera.tile.build import KernelBuilder
from tessera.tile.copying import Copy, needed_for, op_axes, place, points
from tessera.tile.dialect import (
    PARALLEL,
    ContractOp,
    KernelOp,
    ReduceExpOp,
    ReduceOp,
    ScanOp,
    StoreOp,
    axes_of,
    element_of,
)
from tessera.tile.index import Index, name
from tessera.tile.schedule import inner_axis, plan, reduced_axis
from tessera.util.names import names

KINDS = names("sum prod max min any all")
PART = "part"


@dataclass(frozen=True)
class Scratch:
    element: Attribute
    size: Index  # elements, all parts together


@dataclass(frozen=True)
class Split:
    first: KernelOp
    second: KernelOp
    scratch: list[Scratch]  # buffers of both kernels, after the original ones


def can_split(kernel: KernelOp) -> bool:
    """Whether the reductions are of the first level, can be combined from parts, and end all work along the axis."""
    axis = reduced_axis(kernel)
    if axis is None or kernel.walked or inner_axis(kernel):
        return False
    if any(isinstance(op, (ScanOp, ReduceExpOp)) for op in kernel.block.ops):
        return False
    if sum(step.axis is not None for step in plan(kernel)) != 1:
        return False
    ends = _ends(kernel)
    return bool(ends) and all(isinstance(op, ContractOp) or op.kind.data in KINDS for op in ends)


def _ends(kernel: KernelOp) -> list[ReduceOp | ContractOp]:
    return [op for op in kernel.block.ops if isinstance(op, (ReduceOp, ContractOp))]


def split(kernel: KernelOp, parts: int) -> Split:
    assert can_split(kernel), f"{kernel.sym_name.data} cannot be split"
    axis = reduced_axis(kernel)
    assert axis is not None
    size = kernel.axis(axis).size.expr
    scratch = [Scratch(element_of(op.result), points(kernel, axes_of(op.result)) * parts) for op in _ends(kernel)]
    return Split(_first(kernel, axis, size, parts), _second(kernel, axis, parts), scratch)


# --- the two kernels ---


def _first(kernel: KernelOp, axis: str, size: Index, parts: int) -> KernelOp:
    k = KernelBuilder(f"{kernel.sym_name.data}_parts", [s.data for s in kernel.symbol_names])
    chunk = (size + (parts - 1)) // parts
    k.axis(PART, parts)
    for a in kernel.axes:
        reduce = a.kind.data != PARALLEL
        k.axis(a.axis.data, chunk if reduce else a.size.expr, reduce=reduce)
    buffers = [k.buffer(element_of(b)) for b in kernel.buffers]
    kept = [k.buffer(element_of(op.result)) for op in _ends(kernel)]
    whole = name(PART) * chunk + name(axis)
    copy = Copy(k, dict(zip(kernel.buffers, buffers, strict=True)), {axis: whole})
    exact = size.constant is not None and size.constant % parts == 0
    inside = None if exact else k.apply("lt", k.iota(whole), k.iota(size))
    wanted = _needed(kernel)
    at = {op: i for i, op in enumerate(_ends(kernel))}
    for op in kernel.block.ops:
        if op in at:
            assert isinstance(op, (ReduceOp, ContractOp))
            value = copy.reduction(op, inside)
            axes = axes_of(op.result)
            at_part = name(PART) * points(kernel, axes) + place(kernel, axes)
            k.store(value, kept[at[op]], at_part)
        elif op in wanted:
            copy(op, inside if axis in op_axes(op) else None)
    return k.finish()


def _second(kernel: KernelOp, axis: str, parts: int) -> KernelOp:
    k = KernelBuilder(f"{kernel.sym_name.data}_whole", [s.data for s in kernel.symbol_names])
    for a in kernel.axes:
        if a.axis.data != axis:
            k.axis(a.axis.data, a.size.expr)
    k.axis(PART, parts, reduce=True)
    buffers = [k.buffer(element_of(b)) for b in kernel.buffers]
    kept = [k.buffer(element_of(op.result)) for op in _ends(kernel)]
    copy = Copy(k, dict(zip(kernel.buffers, buffers, strict=True)), {})
    at = {op: i for i, op in enumerate(_ends(kernel))}
    for op in kernel.block.ops:
        if op in at:
            axes = axes_of(op.result)
            at_part = name(PART) * points(kernel, axes) + place(kernel, axes)
            kind = op.kind.data if isinstance(op, ReduceOp) else "sum"
            copy.values[op.result] = k.reduce(kind, k.load(kept[at[op]], at_part), PART)
        elif axis not in op_axes(op):
            copy(op, None)
    return k.finish()


def _needed(kernel: KernelOp) -> set[Operation]:
    """What the reductions, and stores along the reduced axis, are computed from."""
    axis = reduced_axis(kernel)
    stores = [op for op in kernel.block.ops if isinstance(op, StoreOp) and axis in op_axes(op)]
    return needed_for(kernel, [*_ends(kernel), *stores])
