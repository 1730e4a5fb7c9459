"""Operations of one kernel written into another: what makes two kernels out of one stands on this.

In: operations of a kernel, and a builder of another. Out: the same operations there, with index expressions
substituted and, where only some of the points exist, loads, stores and reductions held to those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from xdsl.dialects.builtin import AnyFloat, FloatAttr, IntegerAttr
from xdsl.ir import Attribute, Operation, SSAValue

from tessera.tile.dialect.build import KernelBuilder
from tessera.tile.dialect.index import Index, name
from tessera.tile.dialect.ops import (
    ApplyOp,
    CastOp,
    ConstantOp,
    ContractOp,
    IotaOp,
    KernelOp,
    LoadOp,
    RandomOp,
    ReduceExpOp,
    ReduceOp,
    ScanOp,
    StoreOp,
)
from tessera.tile.dialect.types import ValueType, axes_of, element_of

Reduction = ReduceOp | ContractOp | ReduceExpOp


def points(kernel: KernelOp, axes: tuple[str, ...]) -> Index:
    """How many positions some axes have together."""
    return math.prod((kernel.axis(a).size.expr for a in axes), start=Index.of(1))


def place(kernel: KernelOp, axes: tuple[str, ...]) -> Index:
    """Row-major position over some axes."""
    at = Index.of(0)
    for a in axes:
        at = at * kernel.axis(a).size.expr + name(a)
    return at


def op_axes(op: Operation) -> set[str]:
    """The axes of everything that an operation reads, makes or names."""
    axes = {a for v in (*op.results, *op.operands) if isinstance(v.type, ValueType) for a in axes_of(v)}
    return axes | (set(op.at.expr.names()) if isinstance(op, (LoadOp, StoreOp, IotaOp)) else set())


def needed_for(kernel: KernelOp, ends: Iterable[Operation], given: Iterable[Operation] = ()) -> set[Operation]:
    """Operations, and all that they are computed from, up to what is given."""
    wanted, stop = set(ends), set(given)
    for op in reversed(list(kernel.block.ops)):
        if op in wanted and op not in stop:
            wanted |= {v.owner for v in op.operands if isinstance(v.owner, Operation)}
    return wanted


def zero_outside(v: SSAValue) -> bool:
    """Whether what lies past the end of an axis is zero: a load gives that where its mask is off, a cast keeps it."""
    while isinstance(v.owner, CastOp):
        v = v.owner.arg
    return isinstance(v.owner, LoadOp) and v.owner.other is None


class Copy:
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
                result = k.load(values[op.buffer], self._at(op), indices, self._mask(op.mask, inside), other)
            case StoreOp():
                indices = [values[v] for v in op.indices]
                mask = self._mask(op.mask, inside)
                k.store(values[op.value], values[op.buffer], self._at(op), indices, mask, op.mode.data)
                return
            case IotaOp():
                result = k.iota(self._at(op), [values[v] for v in op.indices])
            case ConstantOp():
                assert isinstance(op.value, (IntegerAttr, FloatAttr))
                result = k.constant(op.value.value.data, element_of(op.result))
            case ApplyOp():
                result = k.apply(op.fn.data, *(values[v] for v in op.args), element=element_of(op.result))
            case CastOp():
                result = k.cast(values[op.arg], element_of(op.result))
            case RandomOp():
                result = k.random(values[op.seed], values[op.offset])
            case ReduceOp():
                result = k.reduce(op.kind.data, values[op.arg], op.axis.data)
            case ReduceExpOp():
                how = (op.axis.data, op.fn.data, op.infinite.data)
                values.update(zip(op.results, k.reduce_exp(values[op.arg], *how), strict=True))
                return
            case ScanOp():
                result = k.scan(op.kind.data, values[op.arg], op.axis.data)
            case _:
                raise NotImplementedError(f"a kernel split in two has no rule for {op.name}")
        values[op.results[0]] = result

    def reduction(self, op: Reduction, inside: SSAValue | None) -> list[SSAValue]:
        """The reduction of one part; what lies past the end of the axis counts for nothing."""
        k = self.k
        if isinstance(op, ContractOp):
            sides = [self.values[v] for v in (op.lhs, op.rhs)]
            clean = [v if inside is None or zero_outside(v) else self._only(inside, v, 0) for v in sides]
            return [k.contract(clean[0], clean[1], op.axis.data)]
        arg, exponential = self.values[op.arg], isinstance(op, ReduceExpOp)
        kind = "max" if exponential else op.kind.data
        if inside is not None:
            arg = self._only(inside, arg, _identity(kind, element_of(op.arg)))
        if exponential:  # a part may be all infinite where the whole is not
            return list(k.reduce_exp(arg, op.axis.data, op.fn.data, "zero"))
        return [k.reduce(kind, arg, op.axis.data)]

    def _only(self, inside: SSAValue, value: SSAValue, other: float) -> SSAValue:
        return self.k.apply("select", inside, value, self.k.constant(other, element_of(value)))


def _identity(kind: str, element: Attribute) -> float:
    if kind in ("sum", "any"):
        return 0
    if kind in ("prod", "all"):
        return 1
    if isinstance(element, AnyFloat):
        return -math.inf if kind == "max" else math.inf
    bits = element.width.data  # type: ignore[attr-defined]
    return -(2 ** (bits - 1)) if kind == "max" else 2 ** (bits - 1) - 1
