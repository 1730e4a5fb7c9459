"""Softmax sums in two reductions, for targets that hold rows whole: the inverse of `online`.

    m, s = reduce_exp x   -->   m = reduce max x; s = reduce sum exp(x - m)

In: a kernel. Out: the same kernel, changed in place, without `reduce_exp`.
"""

from __future__ import annotations

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import Rewriter

from tessera.tile.dialect.build import i1
from tessera.tile.dialect.ops import ApplyOp, KernelOp, ReduceExpOp, ReduceOp
from tessera.tile.dialect.types import axes_of, element_of, value_type
from tessera.tile.rewrites.numbers import constant_op


def offline(kernel: KernelOp) -> None:
    for op in list(kernel.block.ops):
        if isinstance(op, ReduceExpOp):
            _part(op)


def without_reduce_exp(kernel: KernelOp) -> KernelOp:
    """The kernel itself, or a copy in which softmax sums are two reductions."""
    if any(isinstance(op, ReduceExpOp) for op in kernel.block.ops):
        kernel = kernel.clone()
        offline(kernel)
    return kernel


def _part(op: ReduceExpOp) -> None:
    top = _reduce("max", op.arg, op.axis)
    ops: list[Operation] = [top]

    def apply(fn: str, *args: SSAValue) -> SSAValue:
        used = {a for v in args for a in axes_of(v)}
        axes = [a for a in axes_of(op.arg) if a in used]
        result = value_type(i1 if fn == "isinf" else element_of(op.arg), axes)
        ops.append(ApplyOp(operands=[list(args)], properties={"fn": StringAttr(fn)}, result_types=[result]))
        return ops[-1].results[0]

    base = top.result
    if op.infinite.data == "zero":
        zero = constant_op(0.0, element_of(op.arg))
        ops.append(zero)
        base = apply("select", apply("isinf", top.result), zero.results[0], top.result)
    total = _reduce("sum", apply(op.fn.data, apply("sub", op.arg, base)), op.axis)
    top.result.name_hint, total.result.name_hint = op.top.name_hint, op.total.name_hint
    Rewriter.replace_op(op, [*ops, total], [top.result, total.result])


def _reduce(kind: str, arg: SSAValue, axis: StringAttr) -> ReduceOp:
    left = value_type(element_of(arg), [a for a in axes_of(arg) if a != axis.data])
    return ReduceOp(operands=[arg], properties={"kind": StringAttr(kind), "axis": axis}, result_types=[left])
