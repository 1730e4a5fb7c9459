"""Embedding bags as sums of bags, and their gradients too.

In: a trace. Out: the same program, where on a GPU embedding bags that sum, or take the mean, are `tessera.bag_sum`. So
is the gradient of a table whose bags sum: a row gets what the bags got that read it. PyTorch sorts the indices, numbers
the distinct ones, adds in parts, and scatters the parts over zeros.

    dw = aten._embedding_bag_backward(dy, indices, offsets, …, n, …)
    -->
    places, order = aten.sort(indices, stable=True)
    starts = aten.searchsorted(places, aten.arange(n + 1))
    dw = tessera.bag_sum(dy, bag_of[order], starts)

Where a table has more rows than were read, most bags would be empty, and the gradient stays PyTorch's. A bag of which
more is read than its sum (by a gradient that stays) stays whole.
"""

from __future__ import annotations

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ops.bags import BAG_SUM
from tessera.ops.families import cast

DEVICES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE = 1 << 18  # elements that are added, from which on reading them takes longer than a launch
FORWARD = ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
BACKWARD = "_embedding_bag_backward"
SUM, MEAN = 0, 1  # of PyTorch's modes
MOST = 1 << 31  # places that 32 bits number, which take half as long to sort as 64


def embedding_bags(trace: Trace) -> Trace:
    """Embedding bags, and gradients of their tables, as sums of bags."""
    gradients = {eqn for eqn in trace.equations if _sums_gradients(eqn)}
    forward = [eqn for eqn in trace.equations if eqn.opname in FORWARD and _sums(eqn)]
    if not forward and not gradients:
        return trace
    left = {v for eqn in trace.equations if eqn not in gradients for v in eqn.inputs()}
    left.update(v for v in trace.outputs if isinstance(v, Value))
    sums = {eqn for eqn in forward if not left.intersection(v for v in eqn.outputs[1:] if v is not None)}
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        if eqn in gradients:
            rewrite.replace(eqn, _gradient)
        elif eqn in sums:
            rewrite.replace(eqn, _sum, (eqn.outputs[0], None, None, None))
    return rewrite.finish()


def by_place(index: Value, many: int) -> tuple[Value, Value]:
    """The order in which indices into `many` places go up, and where those of each place begin in it."""
    kind = torch.int32 if many < MOST else torch.int64
    places, order = aten.sort(cast(index, kind), stable=True)
    numbers = aten.arange(many + 1, dtype=kind, device=index.tensor.device)
    return order, aten.searchsorted(places, numbers)


def _large(rows: Arg, indices: Arg, offsets: Arg) -> bool:
    if not isinstance(rows, Value) or not isinstance(indices, Value) or indices.ndim != 1:
        return False
    if any(v.tensor.is_symbolic for v in (rows, indices, offsets) if isinstance(v, Value)):
        return False
    there = rows.tensor.device.type in DEVICES and rows.dtype in DTYPES
    return there and indices.numel() * rows.shape[1] >= LARGE


def _sums(eqn: Equation) -> bool:
    (rows, indices, offsets, _, mode, _, weights, *_), _ = eqn.bound()
    same = weights is None or (isinstance(weights, Value) and weights.dtype == rows.dtype)  # type: ignore[union-attr]
    return mode in (SUM, MEAN) and same and _large(rows, indices, offsets)


def _sum(eqn: Equation) -> list[Value | None]:
    (rows, indices, offsets, _, mode, _, weights, last, *rest), _ = eqn.bound()
    padding = -1 if not rest or rest[0] is None else rest[0]
    if eqn.opname == "embedding_bag" and rest and isinstance(rest[0], int) and rest[0] < 0:  # it counts from the end
        padding = rest[0] + rows.shape[0]  # type: ignore[union-attr]
    return [emit(BAG_SUM, rows, indices, offsets, bool(last), weights, mode == MEAN, padding), None, None, None]


def _sums_gradients(eqn: Equation) -> bool:
    if eqn.opname != BACKWARD:
        return False
    (grad, indices, offsets, _, _, _, many, by_frequency, mode, sparse, _, padding), _ = eqn.bound()
    plain = mode == SUM and not by_frequency and not sparse and padding == -1
    return plain and _large(grad, indices, offsets) and indices.shape[0] >= many  # type: ignore[union-attr,operator]


def _gradient(eqn: Equation) -> Value:
    (grad, indices, offsets, _, _, _, many, _, _, _, weights, _), _ = eqn.bound()
    assert isinstance(indices, Value) and isinstance(offsets, Value) and isinstance(many, int)
    order, starts = by_place(indices, many)
    numbers = aten.arange(indices.shape[0], dtype=offsets.dtype, device=indices.tensor.device)
    bag_of = aten.sub(aten.searchsorted(offsets, numbers, right=True), 1)
    factors = None if weights is None else aten.index_select(weights, 0, order)
    return emit(BAG_SUM, grad, aten.index_select(bag_of, 0, order), starts, True, factors)
