"""Fused multiply-add: a * b + c with one rounding.

In: a kernel. Out: the same kernel, changed in place: a float product that is used once, by a sum, is joined with it.
Results may differ from PyTorch's in the last bit (they are closer to the exact ones), so that only a target whose
compiler does not do it itself asks for this.
"""

from __future__ import annotations

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import SSAValue
from xdsl.rewriter import Rewriter

from tessera.tile.dialect.ops import ApplyOp, KernelOp
from tessera.tile.rewrites.identities import is_float, made_by


def fma(kernel: KernelOp) -> None:
    for op in list(kernel.block.ops):
        if isinstance(op, ApplyOp) and op.fn.data == "add" and is_float(op.result):
            _join(op)


def _join(op: ApplyOp) -> None:
    left, right = op.args
    for product, other in ((left, right), (right, left)):
        inner = _only_product(product)
        if inner is not None and product is not other:
            new = ApplyOp(
                operands=[[*inner.args, other]],
                properties={"fn": StringAttr("fma")},
                result_types=[op.result.type],
            )
            Rewriter.replace_op(op, new)
            Rewriter.erase_op(inner)
            return


def _only_product(v: SSAValue) -> ApplyOp | None:
    op = made_by(v, "mul")
    return op if op is not None and v.has_one_use() else None
