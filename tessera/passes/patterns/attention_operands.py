"""Attention reads its operands where they lie, if fused kernels can.

In: a trace. Out: the same program, where on a GPU attention no longer reads queries, keys and values that were copied
for it alone. Models write `x.view(…).transpose(1, 2).contiguous()`; every fused kernel takes heads that lie beside each
other, as a linear layer wrote them. What attention gives lies as its queries do, so the copy behind it goes too, and
the gradients' copies.

No fused kernel takes a head whose numbers lie apart, as behind a convolution whose channels are heads: all of attention
would run as products of float32, which hold every score. Such an operand is copied, token by token.
"""

from __future__ import annotations

from functools import partial

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Value
from tessera.ir.relayout import Relayout
from tessera.ir.trace import Trace
from tessera.ir.types import overlaps_itself, size_key
from tessera.torch_internals.operators import aten_name

ATTENTION = "scaled_dot_product_attention"
DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)  # those of the fused kernels that take any strides
ALIGNED = 16  # bytes: what kernels load at a time


def attention_operands(trace: Trace) -> Trace:
    """Leave out copies that only attention reads, and copy what no fused kernel reads."""
    users, results = trace.users(), set(trace.results())
    copies = {
        eqn.out
        for eqn in trace.equations
        if _copies(eqn)
        and eqn.out not in results
        and all(_is_operand(eqn.out, user) for user in users.get(eqn.out, ()))
    }
    if not copies and not any(map(_unreadable, trace.equations)):
        return trace
    rewrite = Relayout(trace)
    for eqn in rewrite:
        moved = rewrite.moved(eqn)
        if copies.intersection(eqn.results()) or (moved and _copies_nothing(eqn)):
            rewrite.write(eqn, partial(aten.alias, eqn.args[0]))
        elif strided := _unreadable(eqn):
            rewrite.write(eqn, partial(_over_copies, eqn, strided))
        elif moved:
            rewrite.type_again(eqn)
    return rewrite.finish()


def _copies(eqn: Equation) -> bool:
    """Does it copy what fused kernels can read as it lies?"""
    if eqn.opname not in ("contiguous", "clone") or not isinstance(x := eqn.args[0], Value):
        return False
    t = x.tensor
    if t.ndim != 4 or t.is_symbolic or t.device.type not in DEVICES or t.dtype not in DTYPES:
        return False
    aligned = all(step * t.dtype.itemsize % ALIGNED == 0 for step in (*t.stride[:-1], t.shape[-1]))
    return t.stride[-1] == 1 and aligned and not overlaps_itself(t.shape, t.stride)


def _is_operand(v: Value, reader: Equation) -> bool:
    """Is it a query, a key or a value, and nothing else?"""
    return aten_name(reader.op) == ATTENTION and v in reader.args[:3] and v not in reader.args[3:]


def _unreadable(eqn: Equation) -> list[Value]:
    """Queries, keys and values that keep fused kernels from an attention which they would take otherwise."""
    if aten_name(eqn.op) != ATTENTION:
        return []
    operands = [v for v in dict.fromkeys(eqn.args[:3]) if isinstance(v, Value)]
    return [v for v in operands if _apart(v)] if all(map(_fusible, operands)) else []


def _fusible(v: Value) -> bool:
    t, width = v.tensor, v.shape[-1]
    fused = t.ndim == 4 and t.device.type in DEVICES and t.dtype in DTYPES
    return fused and isinstance(width, int) and width * t.dtype.itemsize % ALIGNED == 0


def _apart(v: Value) -> bool:
    return size_key(v.tensor.stride[-1]) != 1


def _over_copies(eqn: Equation, strided: list[Value]) -> object:
    """The same attention over copies of some operands."""
    copies = {v: _by_token(v) for v in strided}
    again = eqn.substitute(copies)
    return emit(again.op, *again.args, **again.kwargs)


def _by_token(v: Value) -> Value:
    """The same numbers as [B, T, H, D] in memory; what batches or heads share is not written out."""
    once = v
    for d in (0, 1):
        if size_key(v.tensor.stride[d]) == 0:
            once = aten.slice(once, d, 0, 1)
    rows = aten.clone(aten.permute(once, [0, 2, 1, 3]), memory_format=torch.contiguous_format)
    copy = aten.permute(rows, [0, 2, 1, 3])
    return copy if once is v else aten.expand(copy, list(v.shape))


def _copies_nothing(eqn: Equation) -> bool:
    x = eqn.args[0] if eqn.opname == "contiguous" and len(eqn.args) == 1 and not eqn.kwargs else None
    return isinstance(x, Value) and x.tensor.is_row_major
