"""Rows that are added at the same indices again and again: the indices are sorted once.

In: a trace. Out: the same program, where on a GPU rows added at indices that several equations share (messages along
the edges of a graph, layer by layer, forward and backward) are summed by bags. PyTorch sorts the indices of an
`index_put` each time, and adds the rows of an `index_add` by atomics, rounding at every one. Sorted, the rows of a
place stand side by side in an order that equations share after `cse`; a bag is summed in single precision, rounded
once, and always in the same order. An index that only one equation adds at is left alone: it would be sorted for it.

    y = aten.index_put(zeros, [index], rows, True)
    -->
    places, order = aten.sort(index, stable=True)
    starts = aten.searchsorted(places, aten.arange(n + 1))
    y = tessera.bag_sum(rows, order, starts)

Bags leave out what stands beyond the last of them, where eager asserts on the device: the program asserts, once an
index.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ops.bags import BAG_SUM
from tessera.ops.families import product

DEVICES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE = 1 << 18  # elements that are added, from which on reading them takes longer than a launch
SHARED = 2  # equations that add at an index
ZEROS = ("zeros", "zeros_like", "new_zeros")
INTEGERS = (torch.int64, torch.int32)


def add_rows(trace: Trace) -> Trace:
    """Sum rows that are added at shared indices by bags."""
    added = [(eqn, where) for eqn in trace.equations if (where := _added(eqn)) is not None]
    counts = Counter(index for _, (_, index, _) in added)
    if all(count < SHARED for count in counts.values()):
        return trace
    wrapped = {index for eqn, (_, index, _) in added if eqn.opname == "index_put"}
    rewrite, checked = Rewrite(trace), set()
    for eqn in rewrite:
        where = _added(eqn)
        if where is not None and counts[where[1]] >= SHARED:
            index = where[1]
            # As in eager, indices of an `index_put` count from the end where they are negative; others may not be.
            check = (index, eqn.opname == "index_add" and index in wrapped)
            rewrite.replace(eqn, partial(_by_bags, rewrite, index in wrapped, check not in checked))
            checked.add(check)
    return rewrite.finish()


def _added(eqn: Equation) -> tuple[Value, Value, Value] | None:
    """What is added to, the indices of its rows, and the rows; None where that is not what an equation does."""
    match eqn.opname:
        case "index_put":
            (x, indices, rows, accumulate), _ = eqn.bound()
            index = indices[0] if len(indices) == 1 and accumulate else None  # type: ignore[arg-type,index]
        case "index_add":
            (x, dim, index, rows), keyword = eqn.bound()
            index = index if dim in (0, -x.ndim) and keyword.get("alpha", 1) == 1 else None  # type: ignore[attr-defined]
        case _:
            return None
    return (x, index, rows) if _worth(x, index, rows) else None  # type: ignore[return-value]


def _worth(x: Arg, index: Arg, rows: Arg) -> bool:
    if not all(isinstance(v, Value) for v in (x, index, rows)):
        return False
    assert isinstance(x, Value) and isinstance(index, Value) and isinstance(rows, Value)
    if any(v.tensor.is_symbolic for v in (x, index, rows)) or index.ndim != 1 or x.ndim < 2:
        return False
    plain = rows.shape == (index.shape[0], *x.shape[1:]) and index.dtype in INTEGERS and x.dtype in DTYPES
    return plain and rows.numel() >= LARGE and x.dtype == rows.dtype and x.tensor.device.type in DEVICES


def _by_bags(rewrite: Rewrite, wraps: bool, check: bool, eqn: Equation) -> Value:
    """`wraps`: the index counts from the end where it is negative. `check`: nobody has looked at its range yet."""
    added = _added(eqn)
    assert added is not None
    x, index, rows = added
    many, width = x.shape[0], product(x.shape[1:])
    wrapped = aten.where(aten.lt(index, 0), aten.add(index, many), index) if wraps else index
    places, order = aten.sort(wrapped, stable=True)
    if check:
        lowest = aten.amin(index) if wraps and eqn.opname == "index_add" else aten.select(places, 0, 0)
        within = aten.logical_and(aten.ge(lowest, 0), aten.lt(aten.select(places, 0, -1), many))
        emit(torch.ops.aten._assert_async.msg, within, f"{eqn.opname}: index out of range")
    numbers = aten.arange(many + 1, dtype=index.dtype, device=index.tensor.device)
    starts = aten.searchsorted(places, numbers)
    flat = aten.reshape(rows, [rows.shape[0], width])
    bags = emit(BAG_SUM, flat, order, starts)
    total = bags if x.ndim == 2 else aten.view(bags, list(x.shape))
    return total if _is_zero(rewrite, x) else aten.add(x, total)


def _is_zero(rewrite: Rewrite, x: Value) -> bool:
    maker = rewrite.makers.get(x)
    while maker is not None and maker.opname == "detach":
        maker = rewrite.makers.get(maker.inputs()[0])
    return maker is not None and maker.opname in ZEROS
