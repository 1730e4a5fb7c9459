"""Softmax, embedding and dropout.

Softmax is kept whole with its dtype argument; its derivative maps cotangents and tangents alike, for it is
symmetric. Dropout draws the bits eager draws for the same seed, and keeps its mask for backward.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.types import Size, TensorType, size_hint
from tessera.ops.families import along, cast, is_number, per_element, product
from tessera.ops.op import declare

# --- softmax ------------------------------------------------------------------------------------------


def _through_softmax(t: Value, x: Value, y: Value, dim: int) -> Value:
    """The derivative of softmax applied to `t`, in the dtype of `x` where one kernel does both."""
    fused = y.tensor.device.type == "cuda" and (x.dtype, y.dtype) == (torch.float16, torch.float32)
    return aten._softmax_backward_data(t, y, dim, x.dtype if fused else y.dtype)


def _through_log_softmax(t: Value, x: Value, y: Value, dim: int) -> Value:
    fused = y.tensor.device.type == "cuda" and (x.dtype, y.dtype) == (torch.float16, torch.float32)
    return aten._log_softmax_backward_data(t, y, dim, x.dtype if fused else y.dtype)


def vjp_softmax(ct: Value, y: Value, x: Value, dim: int, *rest: Arg) -> tuple:
    return (lambda: _through_softmax(ct, x, y, dim),)


def vjp_log_softmax(ct: Value, y: Value, x: Value, dim: int, *rest: Arg) -> tuple:
    return (lambda: _through_log_softmax(ct, x, y, dim),)


def jvp_softmax(ts: Sequence[Value | None], y: Value, x: Value, dim: int, *rest: Arg) -> Value:
    assert ts[0] is not None
    return aten._softmax_backward_data(cast(ts[0], y.dtype), y, dim, y.dtype)


def jvp_log_softmax(ts: Sequence[Value | None], y: Value, x: Value, dim: int, *rest: Arg) -> Value:
    assert ts[0] is not None
    t = cast(ts[0], y.dtype)
    return t - aten.sum(aten.exp(y) * t, [dim], True)


# --- embedding ----------------------------------------------------------------------------------------


def vjp_embedding(
    ct: Value, y: Value, w: Value, indices: Value, padding: Size, by_frequency: bool, sparse: bool
) -> tuple:
    return (lambda: aten.embedding_dense_backward(ct, indices, w.shape[0], padding, by_frequency),)


def jvp_embedding(ts: Sequence[Value | None], y: Value, w: Value, indices: Value, *rest: Arg) -> Value:
    return aten.embedding(ts[0], indices)


def _is_dense(eqn: Equation) -> bool:
    return len(eqn.args) < 5 or not eqn.args[4]


def _rows_of_batch(size: Size, indices: Value, rows: Size) -> Value:
    """Indices of a batch of tables laid under each other; those of element b start at b·rows."""
    first = aten.arange(size, dtype=indices.dtype, device=indices.tensor.device) * rows
    return indices + aten.reshape(first, [size, *[1] * (indices.ndim - 1)])


def batch_embedding(
    size: Size, on: Sequence[object], w: Value, indices: Value, padding: Size, by_frequency: bool, sparse: bool
) -> Value:
    if not on[0]:
        return aten.embedding(w, indices, padding, by_frequency, sparse)
    if not on[1]:  # one wide row for the whole batch
        wide = aten.reshape(aten.transpose(w, 0, 1), [w.shape[1], product((size, *w.shape[2:]))])
        y = aten.embedding(wide, indices, padding, by_frequency)
        y = aten.reshape(y, [*indices.shape, size, *w.shape[2:]])
        return aten.movedim(y, indices.ndim, 0)
    table = aten.reshape(w, [product(w.shape[:2]), *w.shape[2:]])
    y = aten.embedding(table, _rows_of_batch(size, indices, w.shape[1]), -1, by_frequency)
    if is_number(padding, -1):
        return y
    padded = aten.unsqueeze(aten.eq(indices, padding), -1)
    return aten.where(padded, aten.detach(y), y)  # rows of padding get no gradient


def batch_embedding_backward(
    size: Size, on: Sequence[object], ct: Value, indices: Value, rows: Size, padding: Size, by_frequency: bool
) -> Value:
    if not on[1]:
        indices = aten.expand(aten.unsqueeze(indices, 0), [size, *indices.shape])
    if not on[0]:
        ct = aten.expand(aten.unsqueeze(ct, 0), [size, *ct.shape])
    if not is_number(padding, -1):
        ct = aten.masked_fill(ct, aten.unsqueeze(aten.eq(indices, padding), -1), 0)
    table = aten.embedding_dense_backward(ct, _rows_of_batch(size, indices, rows), rows * size, -1, by_frequency)
    return aten.reshape(table, [size, rows, *table.shape[1:]])


# --- dropout ------------------------------------------------------------------------------------------


def _memory_order(t: TensorType) -> list[int]:
    """Dimensions from the slowest to the fastest in a tensor that PyTorch lays out like this one, expanded or not."""
    sizes, strides = ([size_hint(n) for n in numbers] for numbers in (t.shape, t.stride))
    like = torch.empty_like(torch.empty_strided(sizes, strides, device="meta"))
    return sorted(range(t.ndim), key=lambda d: -like.stride(d))


def _noise(x: Value, p: float) -> Value:
    """Zeros and ones drawn in memory order, as eager fills a tensor laid out like x, whose contents do not matter."""
    order, x = _memory_order(x.tensor), aten.detach(x)
    if order == list(range(x.ndim)):
        return aten.bernoulli(x, 1 - p)
    drawn = aten.bernoulli(aten.permute(x, order), 1 - p)
    return aten.permute(drawn, sorted(range(x.ndim), key=order.__getitem__))


def forward_dropout(need: Sequence[object], x: Value, p: float, train: bool) -> Generator[Value, Value, tuple]:
    if not train or p == 0 or x.tensor.numel() == 0:
        ct = yield aten.alias(x)
        return (ct,)
    if p == 1:
        nothing = aten.zeros([], dtype=x.dtype, device=x.tensor.device)
        ct = yield x * nothing
        return (lambda: ct * nothing,)
    if x.tensor.device.type == "cuda":
        y, mask = aten.native_dropout(x, p, True)
        ct = yield y
        return (lambda: aten.native_dropout_backward(ct, mask, 1 / (1 - p)),)
    noise = _noise(x, p) / (1 - p)
    ct = yield x * noise
    return (lambda: ct * noise,)


def _declare() -> None:
    for name in ("softmax.int", "_softmax.default"):
        along(f"aten.{name}", "softmax", vjp=vjp_softmax, jvp=jvp_softmax, cost=per_element(6))
    for name in ("log_softmax.int", "_log_softmax.default"):
        along(f"aten.{name}", "softmax", vjp=vjp_log_softmax, jvp=jvp_log_softmax, cost=per_element(6))
    # a row of -inf gives zeros; PyTorch's tangent divides by that row's sum, whose derivative is not finite
    along("aten._safe_softmax.default", "softmax", jvp=jvp_softmax, cost=per_element(6))
    declare(
        "aten.embedding.default",
        "embedding",
        vjp=vjp_embedding,
        jvp=jvp_embedding,
        batch=batch_embedding,
        applies=_is_dense,
        cost=lambda eqn: 0.0,
    )
    for overload in ("default", "padding_idx"):  # taken apart, it would ask now whether its table wants gradients
        declare(f"aten.embedding_bag.{overload}", "embedding")
    declare("aten.embedding_dense_backward.default", "embedding", batch=batch_embedding_backward)
    declare("aten.dropout.default", "dropout", forward=forward_dropout, cost=per_element(3))


_declare()
