"""Attention found in a kernel: two contractions with a softmax between them, as one loop over the keys wants it.

In: a kernel with an inner axis (the head's width, see `schedule.inner_axis`): scores are contracted along it, their
maximum is subtracted, and the exponentials are summed and contracted along the keys. Out: its parts, and what stands
inside such a loop, what in front of it and what after it. Whoever writes the loop keeps a maximum, a sum and a sum of
values, and scales both sums down by the exponential of the difference whenever a larger score comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects.builtin import FloatAttr
from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect.index import name
from tessera.tile.dialect.ops import (
    ApplyOp,
    CastOp,
    ConstantOp,
    ContractOp,
    IotaOp,
    KernelOp,
    LoadOp,
    ReduceOp,
    StoreOp,
)
from tessera.tile.dialect.types import ValueType, axes_of
from tessera.tile.rewrites.copying import zero_outside
from tessera.tile.schedules.schedule import inner_axis, reduced_axis


@dataclass(frozen=True)
class Flash:
    """The operations of a kernel that make it attention."""

    scores: ContractOp
    top: ReduceOp  # the maximum of what is done to the scores
    low: SSAValue  # what is subtracted: the maximum, or something made of it row by row
    below: ApplyOp  # the difference
    total: ReduceOp
    result: ContractOp

    @property
    def ends(self) -> tuple[Operation, Operation, Operation]:
        """What the loop gives."""
        return self.top, self.total, self.result

    @property
    def lowering(self) -> set[Operation]:
        """What makes `low` out of the maximum, in every step."""
        ops: set[Operation] = set()
        stack = [self.low.owner]
        while stack:
            op = stack.pop()
            if isinstance(op, Operation) and op is not self.top and op not in ops:
                ops.add(op)
                stack += [x.owner for x in op.operands]
        return ops


def flash_of(kernel: KernelOp) -> Flash:
    """The parts of attention in a kernel with an inner axis; refuses what is anything else."""
    axis, inner = reduced_axis(kernel), inner_axis(kernel)
    ops = list(kernel.block.ops)
    products = [op for op in ops if isinstance(op, ContractOp)]
    sums = [op for op in ops if isinstance(op, ReduceOp)]
    scores = [op for op in products if op.axis.data == inner]
    results = [op for op in products if op.axis.data == axis]
    tops, totals = ([op for op in sums if op.kind.data == kind] for kind in ("max", "sum"))
    if not len(scores) == len(results) == len(tops) == len(totals) == 1 or len(sums) != 2:
        raise NotImplementedError("expected two products, a maximum and a sum between them")
    e = totals[0].arg.owner
    below = e.args[0].owner if isinstance(e, ApplyOp) and e.fn.data == "exp" else None
    if not (isinstance(e, ApplyOp) and isinstance(below, ApplyOp) and below.fn.data == "sub"):
        raise NotImplementedError("expected the exponential of a difference under the sum")
    weights = results[0].lhs.owner.arg if isinstance(results[0].lhs.owner, CastOp) else results[0].lhs
    if weights is not e.result or below.args[0] is not tops[0].arg or axis in axes_of(below.args[1]):
        raise NotImplementedError("expected the maximum of the scores to be subtracted, and the products to use that")
    for op in (scores[0], results[0]):
        if not all(zero_outside(v) or v is results[0].lhs for v in (op.lhs, op.rhs)):
            raise NotImplementedError("expected products of what is loaded")
    if any(isinstance(op, StoreOp) and axis in made_over(op) for op in ops):
        raise NotImplementedError("expected nothing to be stored for every key: the loop knows scores only so far")
    return Flash(scores[0], tops[0], below.args[1], below, totals[0], results[0])


def made_over(op: Operation) -> set[str]:
    """The axes for every point of which an operation runs."""
    axes = {a for r in op.results if isinstance(r.type, ValueType) for a in r.type.axis_names}
    if isinstance(op, StoreOp):
        axes |= set(op.at.expr.names()) | set(axes_of(op.value))
    if isinstance(op, LoadOp):
        axes |= set(op.at.expr.names()) & set(axes_of(op.result))
    return axes


def after_keys(kernel: KernelOp, parts: Flash) -> list[Operation]:
    """What waits for what the loop gives."""
    late: set[Operation] = set(parts.ends)
    axis = parts.result.axis.data
    for op in kernel.block.ops:
        if axis not in made_over(op) and late & {v.owner for v in op.operands}:
            late.add(op)
    return [op for op in kernel.block.ops if op in late and op not in parts.ends]


def is_causal(parts: Flash, rows: str) -> bool:
    """Whether a row sees keys up to its own position along `rows`: it then needs none of those after its block."""
    return any(_compares(test, rows, parts.result.axis.data) for test in _tests(parts.top.arg))


def _tests(score: SSAValue) -> Iterator[SSAValue]:
    """The conditions under which a score is one at all: select(condition, score, -inf), one inside the other."""
    op = score.owner
    while isinstance(op, ApplyOp) and op.fn.data == "select":
        other = op.args[2].owner
        if not (isinstance(other, ConstantOp) and isinstance(other.value, FloatAttr)):
            return
        if other.value.value.data != -math.inf:
            return
        yield op.args[0]
        op = op.args[1].owner


def _compares(test: SSAValue, rows: str, axis: str) -> bool:
    """key <= row"""
    op = test.owner
    if not isinstance(op, ApplyOp) or op.fn.data != "le":
        return False
    sides = [v.owner for v in op.args]
    return all(isinstance(s, IotaOp) for s in sides) and [s.at.expr for s in sides] == [name(axis), name(rows)]  # type: ignore[union-attr]
