"""One reduction shared by many programs: a kernel becomes two, without atomic additions, so results repeat bit by bit.

    before:  y[j] = f(sum over r < n of x[r, j])
    -->
    first:   scratch[part, j] = sum over r < n / parts of x[part * (n / parts) + r, j]
    second:  y[j] = f(sum over part of scratch[part, j])

It is for reductions with few results and a long axis: columns, whole tensors, small products over a deep axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from xdsl.dialects.builtin import AnyFloat, FloatAttr, IntegerAttr
from xdsl.ir import Attribute, Operation, SSAValue

from tessera.tile.build import KernelBuilder
from tessera.tile.dialect import (
    PARALLEL,
    ApplyOp,
    CastOp,
    ConstantOp,
    ContractOp,
    IotaOp,
    KernelOp,
    LoadOp,
    RandomOp,
    ReduceOp,
    ScanOp,
    StoreOp,
    ValueType,
    axes_of,
    element_of,
)
from tessera.tile.index import Index, name
from tessera.tile.schedule import Schedule, plan, reduced_axis
from tessera.tile.targets.triton.layout import ceil_div, power_of_two, product
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
    if axis is None or any(isinstance(op, ScanOp) for op in kernel.block.ops):
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
    scratch = [Scratch(element_of(op.result), _points(kernel, axes_of(op.result)) * parts) for op in _ends(kernel)]
    return Split(_first(kernel, axis, size, parts), _second(kernel, axis, parts), scratch)


def _points(kernel: KernelOp, axes: tuple[str, ...]) -> Index:
    return product(tuple(kernel.axis(a).size.expr for a in axes))


def _place(kernel: KernelOp, axes: tuple[str, ...]) -> Index:
    """Row-major position over some of the parallel axes."""
    at = Index.of(0)
    for a in axes:
        at = at * kernel.axis(a).size.expr + name(a)
    return at


# --- the two kernels ---


def _first(kernel: KernelOp, axis: str, size: Index, parts: int) -> KernelOp:
    k = KernelBuilder(f"{kernel.sym_name.data}_parts", [s.data for s in kernel.symbol_names])
    chunk = ceil_div(size, parts)
    k.axis(PART, parts)
    for a in kernel.axes:
        reduce = a.kind.data != PARALLEL
        k.axis(a.axis.data, chunk if reduce else a.size.expr, reduce=reduce)
    buffers = [k.buffer(element_of(b)) for b in kernel.buffers]
    kept = [k.buffer(element_of(op.result)) for op in _ends(kernel)]
    whole = name(PART) * chunk + name(axis)
    copy = _Copy(k, dict(zip(kernel.buffers, buffers, strict=True)), {axis: whole})
    exact = size.constant is not None and size.constant % parts == 0
    inside = None if exact else k.apply("lt", k.iota(whole), k.iota(size))
    wanted = _needed(kernel)
    at = {op: i for i, op in enumerate(_ends(kernel))}
    for op in kernel.block.ops:
        if op in at:
            assert isinstance(op, (ReduceOp, ContractOp))
            value = copy.reduction(op, inside)
            axes = axes_of(op.result)
            place = name(PART) * _points(kernel, axes) + _place(kernel, axes)
            k.store(value, kept[at[op]], place)
        elif op in wanted:
            copy(op, inside if axis in _axes(op) else None)
    return k.finish()


def _second(kernel: KernelOp, axis: str, parts: int) -> KernelOp:
    k = KernelBuilder(f"{kernel.sym_name.data}_whole", [s.data for s in kernel.symbol_names])
    for a in kernel.axes:
        if a.axis.data != axis:
            k.axis(a.axis.data, a.size.expr)
    k.axis(PART, parts, reduce=True)
    buffers = [k.buffer(element_of(b)) for b in kernel.buffers]
    kept = [k.buffer(element_of(op.result)) for op in _ends(kernel)]
    copy = _Copy(k, dict(zip(kernel.buffers, buffers, strict=True)), {})
    at = {op: i for i, op in enumerate(_ends(kernel))}
    for op in kernel.block.ops:
        if op in at:
            axes = axes_of(op.result)
            place = name(PART) * _points(kernel, axes) + _place(kernel, axes)
            kind = op.kind.data if isinstance(op, ReduceOp) else "sum"
            copy.values[op.result] = k.reduce(kind, k.load(kept[at[op]], place), PART)
        elif axis not in _axes(op):
            copy(op, None)
    return k.finish()


def _axes(op: Operation) -> set[str]:
    found = {a for v in (*op.results, *op.operands) if isinstance(v.type, ValueType) for a in v.type.axis_names}
    return found | (set(op.at.expr.names()) if isinstance(op, (LoadOp, StoreOp, IotaOp)) else set())


def _needed(kernel: KernelOp) -> set[Operation]:
    """What the reductions, and stores along the reduced axis, are computed from."""
    axis = reduced_axis(kernel)
    wanted: set[Operation] = set(_ends(kernel))
    wanted |= {op for op in kernel.block.ops if isinstance(op, StoreOp) and axis in _axes(op)}
    for op in reversed(list(kernel.block.ops)):
        if op in wanted:
            wanted |= {v.owner for v in op.operands if isinstance(v.owner, Operation)}
    return wanted


class _Copy:
    """Writes operations of a kernel into another, with index expressions substituted."""

    def __init__(self, k: KernelBuilder, buffers: Mapping[SSAValue, SSAValue], places: Mapping[str, Index]) -> None:
        self.k, self.places = k, places
        self.values: dict[SSAValue, SSAValue] = dict(buffers)

    def _at(self, op: LoadOp | StoreOp | IotaOp) -> Index:
        return op.at.expr.substitute(self.places)

    def _mask(self, mask: SSAValue | None, inside: SSAValue | None) -> SSAValue | None:
        own = None if mask is None else self.values[mask]
        if own is None or inside is None:
            return own if inside is None else inside
        return self.k.apply("logical_and", own, inside)

    def __call__(self, op: Operation, inside: SSAValue | None) -> None:
        k, values = self.k, self.values
        match op:
            case LoadOp():
                other = None if op.other is None else values[op.other]
                indices = [values[v] for v in op.indices]
                made = k.load(values[op.buffer], self._at(op), indices, self._mask(op.mask, inside), other)
            case StoreOp():
                indices = [values[v] for v in op.indices]
                mask = self._mask(op.mask, inside)
                k.store(values[op.value], values[op.buffer], self._at(op), indices, mask, op.mode.data)
                return
            case IotaOp():
                made = k.iota(self._at(op), [values[v] for v in op.indices])
            case ConstantOp():
                assert isinstance(op.value, (IntegerAttr, FloatAttr))
                made = k.constant(op.value.value.data, element_of(op.result))
            case ApplyOp():
                made = k.apply(op.fn.data, *(values[v] for v in op.args), element=element_of(op.result))
            case CastOp():
                made = k.cast(values[op.arg], element_of(op.result))
            case RandomOp():
                made = k.random(values[op.seed], values[op.offset])
            case _:
                raise NotImplementedError(f"a split kernel has no rule for {op.name}")
        values[op.results[0]] = made

    def reduction(self, op: ReduceOp | ContractOp, inside: SSAValue | None) -> SSAValue:
        """The reduction of one part; what lies past the end of the axis counts for nothing."""
        k = self.k
        if isinstance(op, ContractOp):
            sides = [self.values[v] for v in (op.lhs, op.rhs)]
            clean = [v if inside is None or _zero_outside(v) else self._only(inside, v, 0) for v in sides]
            return k.contract(clean[0], clean[1], op.axis.data)
        arg = self.values[op.arg]
        kind, element = op.kind.data, element_of(op.arg)
        if inside is not None:
            arg = self._only(inside, arg, _identity(kind, element))
        return k.reduce(kind, arg, op.axis.data)

    def _only(self, inside: SSAValue, value: SSAValue, other: float) -> SSAValue:
        return self.k.apply("select", inside, value, self.k.constant(other, element_of(value)))


def _zero_outside(v: SSAValue) -> bool:
    if isinstance(v.owner, CastOp):
        return _zero_outside(v.owner.arg)
    return isinstance(v.owner, LoadOp) and v.owner.other is None


def _identity(kind: str, element: Attribute) -> float:
    if kind in ("sum", "any"):
        return 0
    if kind in ("prod", "all"):
        return 1
    if isinstance(element, AnyFloat):
        return -math.inf if kind == "max" else math.inf
    bits = element.width.data  # type: ignore[attr-defined]
    return -(2 ** (bits - 1)) if kind == "max" else 2 ** (bits - 1) - 1


# --- their schedules ---


def schedules(kernel: KernelOp, schedule: Schedule) -> tuple[Schedule, Schedule]:
    """The first kernel keeps the blocks; the second holds all parts of a few results in one block."""
    parallel = kernel.axis_names(PARALLEL)
    first = Schedule(schedule.blocks, schedule.warps, schedule.stages, loop=True, group=schedule.group)
    parts = max(power_of_two(schedule.split), 2)
    total = _points(kernel, parallel).constant
    rows = min(max(2048 // parts, 1), 128)
    if total is not None:
        rows = min(rows, power_of_two(max(total, 1)))
    blocks = ((" ".join(parallel), rows), (PART, parts)) if parallel else ((PART, parts),)
    return first, Schedule(blocks, warps=4)
