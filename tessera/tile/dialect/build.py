"""Builds tile kernels: a thin layer over the dialect that infers axes and element types.

k = KernelBuilder("softmax", symbols=["n", "m"])
i, r = k.axis("i", "n"), k.axis("r", "m", reduce=True)
x, y = k.buffer(f32), k.buffer(f32)
a = k.load(x, i * k.symbol("m") + r)
...
kernel = k.finish()
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import (
    BFloat16Type,
    Float8E4M3FNType,
    Float8E5M2Type,
    Float16Type,
    Float32Type,
    Float64Type,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    StringAttr,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from tessera.tile.dialect.index import Index, name
from tessera.tile.dialect.ops import (
    PARALLEL,
    REDUCE,
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
    axes_used,
)
from tessera.tile.dialect.types import AxisAttr, BufferType, axes_of, element_of, index_attr, value_type

f8, f8e5, f16, bf16 = Float8E4M3FNType(), Float8E5M2Type(), Float16Type(), BFloat16Type()
f32, f64 = Float32Type(), Float64Type()
i1, i8, i16, i32, i64 = (IntegerType(n) for n in (1, 8, 16, 32, 64))

Expr = Index | int

# Functions whose result is a truth value whatever they compare.
PREDICATES = frozenset(
    ["eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_and", "logical_or", "logical_not", "logical_xor"]
)


class KernelBuilder:
    """Axes must be declared before the values that vary over them."""

    def __init__(self, name: str, symbols: Sequence[str] = ()) -> None:
        self.name = name
        self.symbol_names = list(symbols)
        self.axes: list[AxisAttr] = []
        self.block = Block()

    # --- declarations ---

    def symbol(self, text: str) -> Index:
        """A size known when the kernel runs."""
        if text not in self.symbol_names:
            self.symbol_names.append(text)
        return name(text)

    def axis(self, text: str, size: Expr | str, reduce: bool = False) -> Index:
        expr = Index.of(size)
        for used in expr.names():
            self.symbol(used)
        self.axes.append(AxisAttr(StringAttr(text), StringAttr(REDUCE if reduce else PARALLEL), index_attr(expr)))
        return name(text)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(a.axis.data for a in self.axes)

    def buffer(self, element: Attribute) -> SSAValue:
        return self.block.insert_arg(BufferType(element), len(self.block.args))

    # --- operations ---

    def _add(self, op: Operation) -> SSAValue:
        self.block.add_op(op)
        return op.results[0] if op.results else None  # type: ignore[return-value]

    def load(
        self,
        buffer: SSAValue,
        offset: Expr,
        indices: Sequence[SSAValue] = (),
        mask: SSAValue | None = None,
        other: SSAValue | None = None,
    ) -> SSAValue:
        expr = Index.of(offset)
        axes = axes_used(self.axis_names, expr, [*indices, *([mask] if mask else []), *([other] if other else [])])
        return self._add(
            LoadOp(
                operands=[buffer, list(indices), mask, other],
                properties={"at": index_attr(expr)},
                result_types=[value_type(element_of(buffer), axes)],
            )
        )

    def store(
        self,
        value: SSAValue,
        buffer: SSAValue,
        offset: Expr,
        indices: Sequence[SSAValue] = (),
        mask: SSAValue | None = None,
        mode: str = "set",
    ) -> None:
        expr = Index.of(offset)
        self._add(
            StoreOp(
                operands=[value, buffer, list(indices), mask],
                properties={"at": index_attr(expr), "mode": StringAttr(mode)},
            )
        )

    def iota(self, expr: Expr, indices: Sequence[SSAValue] = ()) -> SSAValue:
        expr = Index.of(expr)
        axes = axes_used(self.axis_names, expr, indices)
        return self._add(
            IotaOp(operands=[list(indices)], properties={"at": index_attr(expr)}, result_types=[value_type(i64, axes)])
        )

    def constant(self, value: bool | int | float, element: Attribute) -> SSAValue:
        if isinstance(element, IntegerType):
            attr: Attribute = IntegerAttr(int(value), element)
        else:
            attr = FloatAttr(float(value), element)  # type: ignore[arg-type]
        return self._add(ConstantOp(properties={"value": attr}, result_types=[value_type(element, ())]))

    def apply(self, fn: str, *args: SSAValue, element: Attribute | None = None) -> SSAValue:
        """An elementwise function; the element type is the last argument's, or i1 for a predicate."""
        element = element or (i1 if fn in PREDICATES else element_of(args[-1]))
        axes = self._union(args)
        return self._add(
            ApplyOp(operands=[list(args)], properties={"fn": StringAttr(fn)}, result_types=[value_type(element, axes)])
        )

    def cast(self, arg: SSAValue, element: Attribute) -> SSAValue:
        if element_of(arg) == element:
            return arg
        return self._add(CastOp(operands=[arg], result_types=[value_type(element, axes_of(arg))]))

    def reduce(self, kind: str, arg: SSAValue, axis: str) -> SSAValue:
        element = i64 if kind.startswith("arg") else element_of(arg)
        left = [a for a in axes_of(arg) if a != axis]
        return self._add(
            ReduceOp(
                operands=[arg],
                properties={"kind": StringAttr(kind), "axis": StringAttr(axis)},
                result_types=[value_type(element, left)],
            )
        )

    def reduce_exp(
        self, arg: SSAValue, axis: str, fn: str = "exp", infinite: str = "itself"
    ) -> tuple[SSAValue, SSAValue]:
        """The largest element along an axis, and the sum of fn(element - largest)."""
        op = reduce_exp(arg, axis, fn, infinite)
        self.block.add_op(op)
        return op.top, op.total

    def scan(self, kind: str, arg: SSAValue, axis: str) -> SSAValue:
        properties = {"kind": StringAttr(kind), "axis": StringAttr(axis)}
        return self._add(ScanOp(operands=[arg], properties=properties, result_types=[arg.type]))

    def contract(self, lhs: SSAValue, rhs: SSAValue, axis: str) -> SSAValue:
        axes = [a for a in self._union((lhs, rhs)) if a != axis]
        properties = {"axis": StringAttr(axis)}
        return self._add(ContractOp(operands=[lhs, rhs], properties=properties, result_types=[value_type(f32, axes)]))

    def random(self, seed: SSAValue, offset: SSAValue) -> SSAValue:
        axes = self._union((seed, offset))
        return self._add(RandomOp(operands=[seed, offset], result_types=[value_type(i64, axes)]))

    def _union(self, values: Sequence[SSAValue]) -> tuple[str, ...]:
        used = {a for v in values for a in axes_of(v)}
        return tuple(a for a in self.axis_names if a in used)

    def finish(self) -> KernelOp:
        for _ in self.symbol_names:
            self.block.insert_arg(IndexType(), len(self.block.args))
        kernel = KernelOp(self.name, self.axes, self.symbol_names, Region(self.block))
        kernel.verify()
        return kernel


def reduce_exp(arg: SSAValue, axis: str, fn: str, infinite: str) -> ReduceExpOp:
    left = value_type(element_of(arg), [a for a in axes_of(arg) if a != axis])
    properties = {"fn": StringAttr(fn), "axis": StringAttr(axis), "infinite": StringAttr(infinite)}
    return ReduceExpOp(operands=[arg], properties=properties, result_types=[left, left])


def module(*kernels: KernelOp) -> ModuleOp:
    return ModuleOp(list(kernels))
