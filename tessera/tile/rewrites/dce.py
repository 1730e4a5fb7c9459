"""Dead code: operations whose results nobody uses go.

In: a kernel. Out: the same kernel, changed in place: every operation left is a store or leads to one. Buffers and
symbols stay, used or not: they are how the kernel is called.
"""

from __future__ import annotations

from xdsl.rewriter import Rewriter

from tessera.tile.dialect.ops import KernelOp, StoreOp


def dce(kernel: KernelOp) -> None:
    for op in reversed(list(kernel.block.ops)):
        if not isinstance(op, StoreOp) and not any(r.uses for r in op.results):
            Rewriter.erase_op(op)
