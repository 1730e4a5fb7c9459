"""Indexing: reads and writes at places that a tensor of indices or a mask names.

Reading at indices and adding at indices are each other's transposes, so most rules are one line of the other
kind. Index and mask arguments have no derivative. Batching is declared where the batched form is one plain
operator; elsewhere PyTorch's own batching is traced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Equation, Special, Value, values_in
from tessera.ir.types import Size
from tessera.ops.families import (
    call,
    carry,
    cast,
    is_one,
    linear,
    or_zeros,
    pad_rank,
    select,
    shifted,
    sum_to,
    times,
    wrap,
    zeros_for,
)
from tessera.ops.index_batch import batch_masked_read, batch_read, batch_write
from tessera.ops.op import amend, declare
from tessera.torch_internals.fake import FakeTensor

# --- x[i, :, j] -----------------------------------------------------------------------------------


def _zero(ct: Value) -> Value:
    return aten.new_zeros(ct, [])


def _has_mask(indices: Arg) -> bool:
    return any(v.dtype in (torch.bool, torch.uint8) for v in values_in(indices))


def _masked_read(ct: torch.Tensor, indices: list, size: list[int]) -> torch.Tensor:
    if isinstance(ct, FakeTensor):  # how much a mask picks out is known only on data; the sum's shape is not
        return ct.new_empty(size)
    return torch.ops.aten.index.Tensor(ct, indices).sum_to_size(size)


MASKED_READ = Special("masked_read", _masked_read)


def _emit_read(x: Value, indices: Arg, size: list) -> Value:
    return emit(MASKED_READ, x, indices, size)


def _read_masked(ct: Value, indices: Arg, values: Value) -> Value:
    """What a mask picks out of the cotangent, summed to the shape of what was written there."""
    return _emit_read(ct, indices, list(values.shape))


# Reading and summing is the transpose of writing what broadcasts there.
declare(
    "tessera.masked_read",
    "control",
    vjp=lambda ct, y, x, indices, size: (lambda: aten.index_put(zeros_for(x, ct), indices, ct, True),),
    jvp=lambda ts, y, x, indices, size: _emit_read(ts[0], indices, size),
    batch=batch_masked_read,
    real=False,
)


def _index(name: str, put: str) -> None:
    """`index` and `index_put`, checked or not: each reads or writes at a list of indices, None for a whole
    dimension."""
    read, write = call(name), call(put)

    def put_vjp(ct: Value, y: Value, x: Value, indices: Arg, values: Value, accumulate: bool) -> tuple:
        return (
            ct if accumulate else lambda: write(ct, indices, _zero(ct), False),
            None,
            lambda: _read_masked(ct, indices, values) if _has_mask(indices) else sum_to(read(ct, indices), values),
        )

    def put_jvp(ts: Sequence[Value | None], y: Value, x: Value, indices: Arg, values: Value, accumulate: bool) -> Value:
        moved = _zero(y) if ts[2] is None else ts[2]
        return write(or_zeros(ts[0], x), indices, moved, accumulate)

    linear(name, lambda ct, x, indices: write(zeros_for(x, ct), indices, ct, True), batch_read(read), family="index")
    # Without accumulate, which of two values written to one place stays is not defined; nor is its gradient.
    declare(put, "index", vjp=put_vjp, jvp=put_jvp, batch=batch_write(write), real=False)


_index("aten.index.Tensor", "aten.index_put.default")
_index("aten._unsafe_index.Tensor", "aten._unsafe_index_put.default")

# --- gather and scatter: an index for every element ------------------------------------------------


def _along_batch(name: str, shaped_by: int) -> None:
    """Batching of (x, dim, index, …): every tensor gets the batch in front, 0-d rows one dimension more.

    The result is shaped like x (0) or like the index (1)."""

    def batch(size: Size, on: Sequence[bool], x: Value, dim: int, *rest: Arg, **kw: Arg) -> Value:
        pairs = zip((x, *rest), (on[0], *on[2:]), strict=True)
        rows = [carry(a, flag, size) if isinstance(a, Value) else a for a, flag in pairs]
        wide = [aten.unsqueeze(a, 1) if isinstance(a, Value) and a.ndim == 1 else a for a in rows]
        out = again(wide[0], shifted(dim, wide[0]), *wide[1:], **kw)  # type: ignore[arg-type]
        return aten.squeeze(out, 1) if rows[shaped_by].ndim == 1 else out  # type: ignore[union-attr]

    again = call(name)
    amend(name, "batch")(batch)


def _gather_vjp(ct: Value, y: Value, x: Value, dim: int, index: Value, sparse_grad: bool) -> tuple:
    return (lambda: aten.scatter_add(zeros_for(x, ct), dim, index, ct),)


declare(
    "aten.gather",
    "index",
    vjp=_gather_vjp,
    jvp=lambda ts, y, x, dim, index, sparse_grad: aten.gather(ts[0], dim, index),
    real=False,
    applies=lambda eqn: not eqn.kwargs.get("sparse_grad"),
)
declare(
    "aten.scatter.src",
    "index",
    vjp=lambda ct, y, x, dim, index, src: (
        lambda: aten.scatter(ct, dim, index, 0),
        None,
        None,
        lambda: _read_back(ct, dim, index, src),
    ),
    jvp=lambda ts, y, x, dim, index, src: aten.scatter(or_zeros(ts[0], x), dim, index, or_zeros(ts[3], src)),
    real=False,
)
declare(
    "aten.scatter.value",
    "index",
    vjp=lambda ct, y, x, dim, index, value: (lambda: aten.scatter(ct, dim, index, 0),),
    jvp=lambda ts, y, x, dim, index, value: aten.scatter(ts[0], dim, index, 0),
    real=False,
)
declare(
    "aten.scatter_add",
    "index",
    vjp=lambda ct, y, x, dim, index, src: (ct, None, None, lambda: _read_back(ct, dim, index, src)),
    jvp=lambda ts, y, x, dim, index, src: aten.scatter_add(or_zeros(ts[0], x), dim, index, or_zeros(ts[3], src)),
    real=False,
)
_along_batch("aten.gather", shaped_by=1)
for _name in ("scatter.src", "scatter.value", "scatter_add"):
    _along_batch(f"aten.{_name}", shaped_by=0)


def _read_back(ct: Value, dim: int, index: Value, src: Value) -> Value:
    """What a scatter took from `src`: the elements under the index; the rest of a larger source is unused."""
    taken = aten.gather(ct, dim, index)
    for d, (wide, used) in enumerate(zip(src.shape, index.shape, strict=True)):
        if str(wide) != str(used):
            taken = aten.slice_backward(taken, [*taken.shape[:d], wide, *taken.shape[d + 1 :]], d, 0, used, 1)
    return taken


# --- whole slices named by a vector of indices ----------------------------------------------------


def _index_select_batch(size: Size, on: Sequence[bool], x: Value, dim: int, index: Value) -> Value:
    rank = x.ndim - on[0]
    if not on[2] and rank:
        return aten.index_select(x, wrap(dim, rank) + 1, index)
    return _index_select_rows(size, on, x, dim, index, rank)


def _index_select_rows(size: Size, on: Sequence[bool], x: Value, dim: int, index: Value, rank: int) -> Value:
    """Each row has indices of its own: gather, with the index spread over the other dimensions."""
    x = carry(x, on[0], size)
    index = carry(index, on[2], size)
    if not rank:  # 0-d rows: whatever the index, the only element
        zeros = aten.zeros_like(index)
        out = aten.gather(aten.unsqueeze(x, 1), 1, zeros if index.ndim == 2 else aten.unsqueeze(zeros, 1))
        return aten.squeeze(out, 1)
    d = wrap(dim, rank) + 1
    index = index if index.ndim == 2 else aten.unsqueeze(index, 1)
    shape = [*x.shape[:d], index.shape[1], *x.shape[d + 1 :]]
    for axis in range(1, x.ndim):
        if axis != d:
            index = aten.unsqueeze(index, axis)
    return aten.gather(x, d, aten.expand(index, shape))


def _rows(t: Value, dim: int, index: Value) -> Value:
    return aten.index_select(t, dim, index)


def _index_select_vjp(ct: Value, y: Value, x: Value, dim: int, index: Value) -> tuple:
    return (lambda: aten.index_add(zeros_for(x, ct), dim, index, ct),)


def _has_rank(eqn: Equation) -> bool:
    x = eqn.args[0]
    return isinstance(x, Value) and x.ndim > 0


declare(
    "aten.index_select",
    "index",
    vjp=_index_select_vjp,
    jvp=lambda ts, y, x, dim, index: aten.index_select(ts[0], dim, index),
    batch=_index_select_batch,
    real=False,
    applies=_has_rank,
)
declare(
    "aten.index_add",
    "index",
    vjp=lambda ct, y, x, dim, index, source, alpha: (
        ct,
        None,
        None,
        lambda: times(sum_to(_rows(ct, dim, index), source), alpha),
    ),
    jvp=lambda ts, y, x, dim, index, source, alpha: aten.index_add(
        or_zeros(ts[0], x), dim, index, or_zeros(ts[3], source), alpha=alpha
    ),
    applies=_has_rank,
)
declare(
    "aten.index_copy",
    "index",
    vjp=lambda ct, y, x, dim, index, source: (
        lambda: aten.index_fill(ct, dim, index, 0),
        None,
        None,
        lambda: _rows(ct, dim, index),
    ),
    jvp=lambda ts, y, x, dim, index, source: aten.index_copy(or_zeros(ts[0], x), dim, index, or_zeros(ts[3], source)),
    real=False,
    applies=lambda eqn: _has_rank(eqn) and eqn.args[3].ndim > 0,  # type: ignore[attr-defined]
)
declare(
    "aten.index_fill.int_Scalar",
    "index",
    vjp=lambda ct, y, x, dim, index, value: (lambda: aten.index_fill(ct, dim, index, 0),),
    jvp=lambda ts, y, x, dim, index, value: aten.index_fill(ts[0], dim, index, 0),
    batch=lambda size, on, *args: _index_fill_batch(size, on, *args),
    real=False,
)


def _filled(x: Value, ct: Value, dim: int, index: Value) -> Value:
    """The part of `ct` at the places an index_fill of `x` wrote, each once however often it is named."""
    marks = aten.index_fill(aten.zeros_like(ct, dtype=torch.bool), dim, index, True)
    return select(marks, ct)


def _index_fill_batch(size: Size, on: Sequence[bool], x: Value, dim: int, index: Value, value: Arg) -> Value:
    """Mark the named places along the dimension, then choose."""
    x = carry(x, on[0], size)
    wide = aten.unsqueeze(x, 1) if x.ndim == 1 else x
    d = wrap(dim, wide.ndim - 1) + 1
    count = wide.shape[d]
    if on[2]:
        rows = aten.unsqueeze(index, 1) if index.ndim == 1 else index
        rows = aten.where(aten.lt(rows, 0), rows + count, rows)
        marks = aten.scatter(aten.new_zeros(x, [size, count], dtype=torch.bool), 1, rows, True)
    else:
        marks = aten.index_fill(aten.new_zeros(x, [1, count], dtype=torch.bool), 1, index, True)
    for axis in range(1, wide.ndim):
        if axis != d:
            marks = aten.unsqueeze(marks, axis)
    if isinstance(value, Value):
        value = cast(value, x.dtype)
        value = pad_rank(value, wide.ndim) if on[3] else value
    out = aten.where(marks, value, wide)
    return aten.squeeze(out, 1) if x.ndim == 1 else out


declare(
    "aten.index_fill.int_Tensor",
    "index",
    vjp=lambda ct, y, x, dim, index, value: (
        lambda: aten.index_fill(ct, dim, index, 0),
        None,
        None,
        lambda: aten.sum(_filled(x, ct, dim, index)),
    ),
    jvp=lambda ts, y, x, dim, index, value: aten.index_fill(
        or_zeros(ts[0], x), dim, index, _zero(y) if ts[3] is None else ts[3]
    ),
    batch=_index_fill_batch,
    real=False,
)

# --- masks ----------------------------------------------------------------------------------------


def _masked_select_vjp(ct: Value, y: Value, x: Value, mask: Value) -> tuple:
    def grad() -> Value:
        return sum_to(aten.masked_scatter(aten.new_zeros(ct, _broadcast(x, mask)), mask, ct), x)

    return (grad,)


def _broadcast(a: Value, b: Value) -> list[Size]:
    rank = max(a.ndim, b.ndim)
    left, right = [[1] * (rank - v.ndim) + list(v.shape) for v in (a, b)]
    return [r if is_one(s) else s for s, r in zip(left, right, strict=True)]


declare(
    "aten.masked_select", "index", vjp=_masked_select_vjp, jvp=lambda ts, y, x, mask: aten.masked_select(ts[0], mask)
)


# --- take: indices into the flattened tensor -------------------------------------------------------

declare(
    "aten.take",
    "index",
    vjp=lambda ct, y, x, index: (lambda: aten.put(zeros_for(x, ct), index, ct, True),),
    jvp=lambda ts, y, x, index: aten.take(ts[0], index),
    real=False,
)

# --- indices themselves: no derivative -------------------------------------------------------------

for _name in ("nonzero", "searchsorted", "bucketize", "isin", "one_hot", "bincount", "histc"):
    declare(f"aten.{_name}", "index", zero=True)
