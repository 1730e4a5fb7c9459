"""Rows that are added at indices: the indices are sorted once, and rows of a place are summed as a bag.

In: a trace. Out: the same program, where on a GPU rows added at indices (messages along the edges of a graph, the
gradient of what was indexed, of an embedding bag) are summed by bags. PyTorch sorts the indices of an `index_put` each
time, and adds the rows of an `index_add` by atomics, rounding at every one. Sorted, the rows of a place stand side by
side in an order that equations share after `cse`; a bag is summed in single precision, rounded once, and always in the
same order. An `index_add` whose index no other equation adds at is left alone: it would be sorted for it. So is an
`index_put` that adds at few of many places: bags would be empty for the most part.

    y = aten.index_put(zeros, [index], rows, True)
    -->
    places, order = aten.sort(index, stable=True)
    starts = aten.searchsorted(places, aten.arange(n + 1))
    y = tessera.bag_sum(rows, order, starts)

Bags leave out what stands beyond the last of them, where eager asserts on the device: the program asserts, once an
index. Where dimensions stand before those that are indexed, `zeros[:, i, j] += x`, bags are sums of columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ops.bags import BAG_SUM
from tessera.ops.families import cast, product
from tessera.passes.decompose.embedding_bags import DEVICES, DTYPES, LARGE, by_place, embedding_bags
from tessera.passes.decompose.index import made_by

SHARED = 2  # equations that add at an index
ZEROS = ("zeros", "zeros_like", "new_zeros")
INTEGERS = (torch.int64, torch.int32)


def add_rows(trace: Trace) -> Trace:
    """Sum rows that are added at indices by bags."""
    trace = embedding_bags(trace)
    added = [(eqn, where) for eqn in trace.equations if (where := _added(eqn)) is not None]
    if not added and not any(map(_columns, trace.equations)):
        return trace
    counts = Counter(index for _, (_, index, _) in added)
    wrapped = {index for eqn, (_, index, _) in added if eqn.opname == "index_put"}
    rewrite, checked, changed = Rewrite(trace), set(), False
    for eqn in rewrite:
        where = _added(eqn)
        if where is not None and (counts[where[1]] >= SHARED or _sorted_anyway(rewrite, eqn, *where[:2])):
            index = where[1]
            # As in eager, indices of an `index_put` count from the end where they are negative; others may not be.
            check = (index, where[0].shape[0], eqn.opname == "index_add" and index in wrapped)
            rewrite.replace(eqn, partial(_by_bags, rewrite, index in wrapped, check not in checked))
            checked.add(check)
            changed = True
        elif _columns(eqn) and _is_zero(rewrite, eqn.inputs()[0]):
            changed |= rewrite.replace(eqn, _by_columns)
    return rewrite.finish() if changed else trace


def _sorted_anyway(rewrite: Rewrite, eqn: Equation, x: Value, index: Value) -> bool:
    """By PyTorch, for this equation alone; of zeros, bags write every place once, which pays where most have rows."""
    return eqn.opname == "index_put" and index.shape[0] >= x.shape[0] and _is_zero(rewrite, x)


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
    return (x, index, rows) if _worth(x, [index], rows, 0) else None  # type: ignore[return-value]


def _columns(eqn: Equation) -> bool:
    """It adds at indices of the last dimensions, all of what stands before them."""
    if eqn.opname != "index_put":
        return False
    (x, indices, rows, accumulate), _ = eqn.bound()
    assert isinstance(indices, Sequence)
    before = next((k for k, index in enumerate(indices) if index is not None), 0)
    last = isinstance(x, Value) and len(indices) == x.ndim
    return bool(accumulate) and before > 0 and last and _worth(x, indices[before:], rows, before)


def _worth(x: Arg, indices: Sequence[Arg], rows: Arg, before: int) -> bool:
    """Indices are vectors of one length; rows are long enough, and of the right sizes: nothing is broadcast."""
    if not isinstance(x, Value) or not isinstance(rows, Value):
        return False
    vectors = [i for i in indices if isinstance(i, Value) and i.ndim == 1 and i.dtype in INTEGERS]
    if len(vectors) != len(indices) or any(v.tensor.is_symbolic for v in (x, rows, *vectors)) or x.ndim < 2:
        return False
    shape = (*x.shape[:before], vectors[0].shape[0], *x.shape[before + len(vectors) :])
    plain = rows.shape == shape and x.dtype in DTYPES and len({v.shape for v in vectors}) == 1
    return plain and rows.numel() >= LARGE and x.dtype == rows.dtype and x.tensor.device.type in DEVICES


def _by_bags(rewrite: Rewrite, wraps: bool, check: bool, eqn: Equation) -> Value:
    """`wraps`: the index counts from the end where it is negative. `check`: nobody has looked at its range yet."""
    added = _added(eqn)
    assert added is not None
    x, index, rows = added
    many, width = int(x.shape[0]), product(x.shape[1:])
    if check:
        _assert_within(index, 0 if eqn.opname == "index_add" else -many, many, eqn.opname)
    order, starts = by_place(_wrapped(index, many) if wraps else index, many)
    bags = emit(BAG_SUM, aten.reshape(rows, [rows.shape[0], width]), order, starts)
    total = bags if x.ndim == 2 else aten.view(bags, list(x.shape))
    return total if _is_zero(rewrite, x) else aten.add(x, total)


def _by_columns(eqn: Equation) -> Value:
    (x, indices, rows, _), _ = eqn.bound()
    before = indices.index(next(i for i in indices if i is not None))  # type: ignore[union-attr,arg-type]
    places = None
    for size, index in zip(x.shape[before:], indices[before:], strict=True):  # type: ignore[index,union-attr]
        _assert_within(index, -size, size, "index_put")  # type: ignore[arg-type]
        one = cast(_wrapped(index, size), torch.int64)  # type: ignore[arg-type]
        places = one if places is None else aten.add(aten.mul(places, size), one)
    many = product(x.shape[before:])  # type: ignore[union-attr]
    order, starts = by_place(places, many)  # type: ignore[arg-type]
    columns = aten.t(aten.reshape(rows, [-1, rows.shape[-1]]))  # type: ignore[union-attr]
    return aten.view(aten.t(emit(BAG_SUM, columns, order, starts)), list(x.shape))  # type: ignore[union-attr]


def _wrapped(index: Value, many: int) -> Value:
    return aten.where(aten.lt(index, 0), aten.add(index, many), index)


def _assert_within(index: Value, lowest: int, end: int, name: str) -> None:
    within = aten.logical_and(aten.ge(aten.amin(index), lowest), aten.lt(aten.amax(index), end))
    emit(torch.ops.aten._assert_async.msg, within, f"{name}: index out of range")


def _is_zero(rewrite: Rewrite, x: Value) -> bool:
    return made_by(rewrite.makers, x, ZEROS)
