"""Common subexpressions: equal operations are computed once.

In: a kernel. Out: the same kernel, changed in place: of equal operations on equal operands the first stays. A load
is equal to an earlier one of the same buffer only if nothing was stored to that buffer in between.
"""

from __future__ import annotations

from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import Rewriter
from xdsl.traits import Pure

from tessera.tile.dialect.ops import ApplyOp, KernelOp, LoadOp, StoreOp
from tessera.tile.rewrites.identities import COMMUTATIVE


def cse(kernel: KernelOp) -> None:
    known: dict[tuple, Operation] = {}
    stores: dict[SSAValue, int] = {}  # to each buffer, so far
    order: dict[SSAValue, int] = {}
    for op in list(kernel.block.ops):
        if isinstance(op, StoreOp):
            stores[op.buffer] = stores.get(op.buffer, 0) + 1
            continue
        if not (op.has_trait(Pure) or isinstance(op, LoadOp)):
            continue
        written = stores.get(op.buffer, 0) if isinstance(op, LoadOp) else 0
        key = (*_key(op, order), written)
        if key in known:
            Rewriter.replace_op(op, [], known[key].results)
            continue
        known[key] = op
        order.update((r, len(order)) for r in op.results)


def _key(op: Operation, order: dict[SSAValue, int]) -> tuple:
    operands = list(op.operands)
    if isinstance(op, ApplyOp) and op.fn.data in COMMUTATIVE:
        operands.sort(key=lambda v: order.get(v, -1))
    properties = tuple(sorted(op.properties.items()))
    return op.name, tuple(operands), properties, tuple(r.type for r in op.results)
