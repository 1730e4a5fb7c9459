"""Softmax sums in one walk along the axis.

    m = reduce max x; s = reduce sum exp(x - m)   -->   m, s = reduce_exp x

In: a kernel. Out: the same kernel, changed in place, with such pairs joined, also those with exp2 and with an infinite
m taken as zero; the exponentials themselves stay where something else reads them. A target that walks a row of memory
wants this, to read it once; one that holds rows whole wants two reductions (`offline`). Totals may differ in their
last bits.
"""

from __future__ import annotations

from xdsl.dialects.builtin import AnyFloat
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from tessera.tile.dialect.build import reduce_exp
from tessera.tile.dialect.ops import ApplyOp, KernelOp, ReduceOp
from tessera.tile.dialect.types import element_of
from tessera.tile.rewrites.identities import made_by
from tessera.tile.rewrites.numbers import is_number

Total = tuple[ReduceOp, str, str]  # the sum, its fn, what an infinite maximum is taken as


def online(kernel: KernelOp, private: bool = False) -> None:
    """`private`: only where nothing but the sum reads the exponentials, so that none is computed twice."""
    for op in list(kernel.block.ops):
        if isinstance(op, ReduceOp) and (totals := _totals(op, private)):
            _join(op, totals)


def with_reduce_exp(kernel: KernelOp, private: bool = False) -> KernelOp:
    """The kernel itself, or a copy in which softmax sums are joined."""
    if any(isinstance(op, ReduceOp) and _totals(op, private) for op in kernel.block.ops):
        kernel = kernel.clone()
        online(kernel, private)
    return kernel


def _join(op: ReduceOp, totals: list[Total]) -> None:
    _, fn, infinite = totals[0]
    joint = reduce_exp(op.arg, op.axis.data, fn, infinite)
    joint.top.name_hint, joint.total.name_hint = op.result.name_hint, totals[0][0].result.name_hint
    Rewriter.insert_op(joint, InsertPoint.before(op))
    for total, *how in totals:
        if how == [fn, infinite]:
            Rewriter.replace_op(total, [], [joint.total])
    Rewriter.replace_op(op, [], [joint.top])
    _sweep(op.arg)


def _totals(op: ReduceOp, private: bool) -> list[Total]:
    """Sums over the same axis of fn(x - base), base being this maximum of x, or zero where that is infinite."""
    if op.kind.data != "max" or not isinstance(element_of(op.arg), AnyFloat):
        return []
    bases = [(op.result, "itself"), *((v, "zero") for v in _guarded(op.result))]
    return [
        (total, fn.fn.data, infinite)
        for base, infinite in bases
        for left in _users(base)
        if isinstance(left, ApplyOp) and left.fn.data == "sub" and (left.args[0], left.args[1]) == (op.arg, base)
        for fn in _users(left.result)
        if isinstance(fn, ApplyOp) and fn.fn.data in ("exp", "exp2") and (not private or fn.result.has_one_use())
        for total in _users(fn.result)
        if isinstance(total, ReduceOp) and (total.kind.data, total.axis) == ("sum", op.axis)
    ]


def _users(v: SSAValue) -> list[Operation]:
    return list(dict.fromkeys(use.operation for use in v.uses))


def _guarded(top: SSAValue) -> list[SSAValue]:
    """select(isinf(top), 0, top)"""
    guards = []
    for op in _users(top):
        if isinstance(op, ApplyOp) and op.fn.data == "select" and op.args[2] is top and is_number(op.args[1], 0.0):
            test = made_by(op.args[0], "isinf")
            if test is not None and test.args[0] is top:
                guards.append(op.result)
    return guards


def _sweep(arg: SSAValue) -> None:
    """Differences and exponentials that only the joined sums read."""
    for left in _users(arg):
        if isinstance(left, ApplyOp) and left.fn.data == "sub":
            for fn in _users(left.result):
                if isinstance(fn, ApplyOp) and not fn.result.uses:
                    Rewriter.erase_op(fn)
            if not left.result.uses:
                Rewriter.erase_op(left)
