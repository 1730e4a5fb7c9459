"""Sums over one-hot rows, without the sum.

    reduce sum over r < n of select(r == t, a, 0)   -->   select(0 <= t < n, a, 0)

where t and a do not vary along r: the gradient of a loss that picks one class a row adds such a row up. Casts between
the choice and the sum (a row that was rounded to 16 bits) keep the zero, and are made of `a` alone. In: a kernel. Out:
the same kernel, changed in place. An axis along which nothing is combined any more becomes a parallel one, so that what
is left is scheduled as the elementwise work it is.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ArrayAttr, StringAttr
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.rewriter import Rewriter

from tessera.tile.dialect.build import i1
from tessera.tile.dialect.index import name
from tessera.tile.dialect.ops import (
    PARALLEL,
    REDUCE,
    ApplyOp,
    CastOp,
    ContractOp,
    IotaOp,
    KernelOp,
    ReduceExpOp,
    ReduceOp,
    ScanOp,
)
from tessera.tile.dialect.types import AxisAttr, axes_of, element_of, index_attr, value_type
from tessera.tile.rewrites.identities import made_by
from tessera.tile.rewrites.numbers import constant_op, number_of


def one_hot(kernel: KernelOp) -> None:
    if kernel.sequential_axis is not None:  # it needs its reduced axis as it is
        return
    changed = False
    for op in list(kernel.block.ops):
        if isinstance(op, ReduceOp) and op.kind.data == "sum" and (match := _picked(op)) is not None:
            _replace(kernel, op, *match)
            changed = True
    if changed:
        _release(kernel)


def _picked(op: ReduceOp) -> tuple[SSAValue, SSAValue, list[CastOp]] | None:
    """Of a sum over select(axis == t, a, 0), perhaps cast: t, a, and the casts, first one first."""
    row, casts = op.arg, []
    while isinstance(row.owner, CastOp):
        casts.insert(0, row.owner)
        row = row.owner.arg
    choice = made_by(row, "select")
    test = None if choice is None else made_by(choice.args[0], "eq")
    if choice is None or test is None or number_of(choice.args[2]) != 0:
        return None
    axis = op.axis.data
    for place, t in ((test.args[0], test.args[1]), (test.args[1], test.args[0])):
        varies = {*axes_of(t), *axes_of(choice.args[1])}
        if _is_axis(place, axis) and varies == set(axes_of(op.result)):
            return t, choice.args[1], casts
    return None


def _is_axis(v: SSAValue, axis: str) -> bool:
    return isinstance(v.owner, IotaOp) and not v.owner.indices and v.owner.at.expr == name(axis)


def _replace(kernel: KernelOp, op: ReduceOp, t: SSAValue, a: SSAValue, casts: list[CastOp]) -> None:
    size = IotaOp(
        operands=[[]],
        properties={"at": index_attr(kernel.axis(op.axis.data).size.expr)},
        result_types=[value_type(element_of(t), ())],
    )
    converted: list[Operation] = []
    for cast in casts:
        converted.append(CastOp(operands=[a], result_types=[value_type(element_of(cast.result), axes_of(a))]))
        a = converted[-1].results[0]
    first, zero = constant_op(0, element_of(t)), constant_op(0, element_of(a))
    low, high = _apply("ge", i1, t, first.results[0]), _apply("lt", i1, t, size.result)
    inside = _apply("logical_and", i1, low.result, high.result)
    select = ApplyOp(
        operands=[[inside.result, a, zero.results[0]]],
        properties={"fn": StringAttr("select")},
        result_types=[op.result.type],
    )
    Rewriter.replace_op(op, [size, *converted, first, zero, low, high, inside, select])


def _apply(fn: str, element: Attribute, *args: SSAValue) -> ApplyOp:
    axes = axes_of(args[0])
    return ApplyOp(operands=[list(args)], properties={"fn": StringAttr(fn)}, result_types=[value_type(element, axes)])


def _release(kernel: KernelOp) -> None:
    """Reduced axes that nothing reduces become parallel."""
    used = {op.axis.data for op in kernel.block.ops if isinstance(op, (ReduceOp, ReduceExpOp, ScanOp, ContractOp))}
    axes = [
        a if a.kind.data != REDUCE or a.axis.data in used else AxisAttr(a.axis, StringAttr(PARALLEL), a.size)
        for a in kernel.axes
    ]
    kernel.properties["axes"] = ArrayAttr(axes)
