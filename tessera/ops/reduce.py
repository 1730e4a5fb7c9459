"""Reductions, scans and operators that pick elements along a dimension.

A reduction's cotangent is put back over the dimensions it took away (`restore`) and broadcast there.
Operators that pick (max.dim, sort, topk, …) give values and their indices; the cotangent of a value goes to
its index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.types import Size
from tessera.ops.families import (
    along,
    cast,
    dims_of,
    expand_to,
    is_number,
    per_input,
    product,
    reduced_batch,
    reduction,
    restore,
    select,
    shifted,
    wrap,
    zeros_for,
)
from tessera.ops.op import declare
from tessera.ops.products import cumprod_vjp, prod_dim_vjp, prod_vjp

# --- sums -----------------------------------------------------------------------------------------


def _broadcast_back(ct: Value, x: Value, dims: Arg = None, keepdim: Arg = False) -> Value:
    """A cotangent over all the elements it is the sum of."""
    return expand_to(restore(cast(ct, x.dtype), x, dims, keepdim), x.shape)


def _count(x: Value, dims: Arg = None) -> Size:
    return product([x.shape[d] for d in dims_of(dims, x.ndim)])


reduction(
    "aten.sum.dim_IntList",
    vjp=lambda ct, y, x, dims, keepdim, dtype: (lambda: _broadcast_back(ct, x, dims, keepdim),),
    jvp=lambda ts, y, x, dims, keepdim, dtype: aten.sum(ts[0], dims, keepdim, dtype=dtype),
)
reduction(
    "aten.mean.dim",
    vjp=lambda ct, y, x, dims, keepdim, dtype: (lambda: _broadcast_back(ct / _count(x, dims), x, dims, keepdim),),
    jvp=lambda ts, y, x, dims, keepdim, dtype: aten.mean(ts[0], dims, keepdim, dtype=dtype),
)
reduction(
    "aten.nansum",
    vjp=lambda ct, y, x, dims, keepdim, dtype: (
        lambda: select(aten.logical_not(aten.isnan(x)), _broadcast_back(ct, x, dims, keepdim)),
    ),
    jvp=lambda ts, y, x, dims, keepdim, dtype: aten.sum(
        aten.masked_fill(ts[0], aten.isnan(x), 0), dims, keepdim, dtype=dtype
    ),
)


def _over_all(
    name: str, over_dims: Callable, vjp: Callable | None = None, jvp: Callable | None = None, **rules: object
) -> None:
    """A reduction of every element; batched, it reduces every dimension but the first."""

    def batch(size: Size, on: Sequence[bool], x: Value, **kw: Arg) -> Value:
        lifted, dims, _ = reduced_batch(x, None)
        return over_dims(lifted, dims, **kw)

    declare(name, "reduction", vjp=vjp, jvp=jvp, batch=batch, cost=per_input(), **rules)


_over_all(
    "aten.sum.default",
    lambda x, dims, dtype: aten.sum(x, dims, dtype=dtype),
    vjp=lambda ct, y, x, dtype: (lambda: _broadcast_back(ct, x),),
    jvp=lambda ts, y, x, dtype: aten.sum(ts[0], dtype=dtype),
)
_over_all(
    "aten.mean.default",
    lambda x, dims, dtype: aten.mean(x, dims, dtype=dtype),
    vjp=lambda ct, y, x, dtype: (lambda: _broadcast_back(ct / _count(x), x),),
    jvp=lambda ts, y, x, dtype: aten.mean(ts[0], dtype=dtype),
)
_over_all("aten.prod.default", lambda x, dims, dtype: aten.prod(aten.flatten(x, 1), 1, dtype=dtype), vjp=prod_vjp)
reduction("aten.prod.dim_int", single=True, vjp=prod_dim_vjp)

# --- extremes: where several elements share one, each gets an equal part ---------------------------


def _shared(t: Value, x: Value, y: Value, dims: Arg, keepdim: Arg) -> tuple[Value, Value]:
    """Which elements are extreme, and how many in each group."""
    mask = aten.eq(x, restore(y, x, dims, keepdim))
    return mask, aten.sum(mask, dims_of(dims, x.ndim), True) if x.ndim else mask


def _extreme_vjp(ct: Value, y: Value, x: Value, dims: Arg, keepdim: Arg) -> tuple:
    def grad() -> Value:
        mask, count = _shared(ct, x, y, dims, keepdim)
        return restore(ct, x, dims, keepdim) * mask / count

    return (grad,)


def _extreme_jvp(ts: Sequence[Value], y: Value, x: Value, dims: Arg, keepdim: Arg) -> Value:
    mask, count = _shared(ts[0], x, y, dims, keepdim)
    shares = ts[0] * mask / count
    return aten.sum(shares, dims_of(dims, x.ndim), keepdim) if x.ndim else shares


reduction("aten.amax", vjp=_extreme_vjp, jvp=_extreme_jvp)
reduction("aten.amin", vjp=_extreme_vjp, jvp=_extreme_jvp)


def _all_ties(x: Value, y: Value) -> Value:
    return aten.logical_or(aten.eq(x, y), aten.logical_and(aten.isnan(x), aten.isnan(y)))


def _extreme_of_all_vjp(ct: Value, y: Value, x: Value) -> tuple:
    def grad() -> Value:
        mask = _all_ties(x, y)
        return select(mask, ct / aten.sum(mask))

    return (grad,)


def _extreme_of_all_jvp(ts: Sequence[Value], y: Value, x: Value) -> Value:
    mask = aten.eq(x, y)  # of a NaN none: its tangent is NaN
    return aten.sum(mask * (ts[0] / aten.sum(mask)))


_over_all("aten.max.default", lambda x, dims: aten.amax(x, dims), vjp=_extreme_of_all_vjp, jvp=_extreme_of_all_jvp)
_over_all("aten.min.default", lambda x, dims: aten.amin(x, dims), vjp=_extreme_of_all_vjp, jvp=_extreme_of_all_jvp)

# --- picking: (values, indices) along one dimension -----------------------------------------------


def _to_index(ct: Value, x: Value, dim: int, index: Value, keepdim: Arg) -> Value:
    if x.ndim and not keepdim:
        ct, index = aten.unsqueeze(ct, dim), aten.unsqueeze(index, dim)
    return aten.scatter(zeros_for(x, ct), dim, index, ct)


def _at_index(t: Value, x: Value, dim: int, index: Value, keepdim: Arg) -> Value:
    if not x.ndim or keepdim:
        return aten.gather(t, dim, index)
    return aten.squeeze(aten.gather(t, dim, aten.unsqueeze(index, dim)), dim)


def _picks(name: str, dim_at: int, keep_at: int | None, add: bool = False) -> None:
    """(x, …) -> (values, indices); argument `dim_at` is the dimension, `keep_at` keepdim (None: kept)."""

    def place(args: tuple, kw: dict) -> tuple[int, Arg]:
        dim = args[dim_at] if dim_at < len(args) else kw["dim"]
        return wrap(dim, args[0].ndim), True if keep_at is None else args[keep_at]

    def vjp(ct: Sequence[Value | None], y: Sequence[Value], *args: Arg, **kw: Arg) -> tuple:
        if ct[0] is None:
            return ()
        dim, keepdim = place(args, kw)
        x, g = args[0], ct[0]
        assert isinstance(x, Value)
        if add and x.ndim:  # one index may be picked several times
            return (lambda: aten.scatter_add(zeros_for(x, g), dim, y[1], g),)
        return (lambda: _to_index(g, x, dim, y[1], keepdim),)

    def jvp(ts: Sequence[Value], y: Sequence[Value], *args: Arg, **kw: Arg) -> list:
        dim, keepdim = place(args, kw)
        return [_at_index(ts[0], args[0], dim, y[1], keepdim), None]  # type: ignore[arg-type]

    if keep_at is not None and dim_at == 1:
        reduction(name, "pick", keep=keep_at, single=True, vjp=vjp, jvp=jvp)
    elif keep_at is None and name != "aten.sort.stable":  # which takes its dimension by keyword
        along(name, "pick", dim_at, vjp=vjp, jvp=jvp)
    else:
        declare(name, "pick", vjp=vjp, jvp=jvp, cost=per_input())


_picks("aten.max.dim", 1, 2)
_picks("aten.min.dim", 1, 2)
_picks("aten.median.dim", 1, 2)
_picks("aten.nanmedian.dim", 1, 2)
_picks("aten.mode.default", 1, 2)
_picks("aten.kthvalue.default", 2, 3)
_picks("aten.sort.default", 1, None)
_picks("aten.sort.stable", 1, None)
_picks("aten.topk.default", 2, None)
_picks("aten.cummax.default", 1, None, add=True)
_picks("aten.cummin.default", 1, None, add=True)

# --- moments --------------------------------------------------------------------------------------


def _freedom(x: Value, dims: Arg, correction: Arg) -> Arg:
    """Degrees of freedom: elements in a group less the correction."""
    return _count(x, dims) - (1 if correction is None else correction)  # type: ignore[operator]


def _has_freedom(eqn: Equation) -> bool:
    x, dims = (*eqn.args, None)[:2]
    assert isinstance(x, Value)
    degrees = _freedom(x, dims, eqn.kwargs.get("correction"))
    return not isinstance(degrees, (int, float)) or degrees > 0


def _var_grad(ct: Value, x: Value, dims: Arg, correction: Arg, keepdim: Arg) -> Value:
    centred = x - aten.mean(x, dims_of(dims, x.ndim), True) if x.ndim else x - aten.mean(x)
    scaled = ct * 2 / _freedom(x, dims, correction)
    return restore(scaled, x, dims, keepdim) * centred


def _var_push(t: Value, x: Value, dims: Arg, correction: Arg, keepdim: Arg) -> Value:
    if not x.ndim:
        return aten.zeros_like(t)
    listed = dims_of(dims, x.ndim)
    centred = x - aten.mean(x, listed, True)
    return aten.sum(t * centred, listed, keepdim) * 2 / _freedom(x, dims, correction)


def _half_over(t: Value, std: Value) -> Value:
    """The derivative of a root, zero where the root is zero."""
    return aten.masked_fill(t / (std * 2), aten.eq(std, 0), 0)


def _mean_grad(ct: Value, x: Value, dims: Arg, keepdim: Arg) -> Value:
    return _broadcast_back(ct / _count(x, dims), x, dims, keepdim)


def _mean_push(t: Value, x: Value, dims: Arg, keepdim: Arg) -> Value:
    return aten.mean(t, dims_of(dims, x.ndim), keepdim) if x.ndim else t


def _moment(name: str, root: bool, mean: bool) -> None:
    """var, std, var_mean, std_mean: (x, dim, *, correction, keepdim)."""

    def vjp(ct: object, y: object, x: Value, dims: Arg, correction: Arg, keepdim: Arg) -> tuple:
        g, g_mean = ct if mean else (ct, None)  # type: ignore[misc]
        v: Value = y[0] if mean else y  # type: ignore[index,assignment]

        def grad() -> Value:
            parts = []
            if isinstance(g, Value):
                parts.append(_var_grad(_half_over(g, v) if root else g, x, dims, correction, keepdim))
            if isinstance(g_mean, Value):
                parts.append(_mean_grad(g_mean, x, dims, keepdim))
            return parts[0] if len(parts) == 1 else parts[0] + parts[1]

        return (grad,)

    def jvp(ts: Sequence[Value], y: object, x: Value, dims: Arg, correction: Arg, keepdim: Arg) -> object:
        moved = _var_push(ts[0], x, dims, correction, keepdim)
        if root:
            moved = _half_over(moved, y[0] if mean else y)  # type: ignore[index,arg-type]
        return [moved, _mean_push(ts[0], x, dims, keepdim)] if mean else moved

    reduction(name, keep="keepdim", vjp=vjp, jvp=jvp, cost=per_input(4), applies=_has_freedom)


_moment("aten.var.correction", root=False, mean=False)
_moment("aten.std.correction", root=True, mean=False)
_moment("aten.var_mean.correction", root=False, mean=True)
_moment("aten.std_mean.correction", root=True, mean=True)

# --- logsumexp, norms -----------------------------------------------------------------------------


def _softmax_of(x: Value, y: Value, dims: Arg, keepdim: Arg) -> Value:
    return aten.exp(x - restore(y, x, dims, keepdim))


reduction(
    "aten.logsumexp.default",
    vjp=lambda ct, y, x, dims, keepdim: (lambda: restore(ct, x, dims, keepdim) * _softmax_of(x, y, dims, keepdim),),
    jvp=lambda ts, y, x, dims, keepdim: (
        aten.sum(ts[0] * _softmax_of(x, y, dims, keepdim), dims_of(dims, x.ndim), keepdim) if x.ndim else ts[0]
    ),
    cost=per_input(10),
)


def _norm_vjp(ct: Value, y: Value, x: Value, order: Arg, dims: Arg, keepdim: Arg, dtype: torch.dtype | None) -> tuple:
    def grad() -> Value:
        g = restore(ct, x, dims, keepdim)
        if is_number(order, 1):
            return aten.sgn(x) * g
        n = restore(y, x, dims, keepdim)
        return g * aten.masked_fill(x / n, aten.eq(n, 0), 0)

    return (grad,)


def _norm_jvp(
    ts: Sequence[Value], y: Value, x: Value, order: Arg, dims: Arg, keepdim: Arg, dtype: torch.dtype | None
) -> Value:
    t, x = (ts[0], x) if dtype is None else (cast(ts[0], dtype), cast(x, dtype))
    moved = t * (aten.sgn(x) if is_number(order, 1) else x)
    summed = aten.sum(moved, dims_of(dims, x.ndim), keepdim) if x.ndim else moved
    return summed if is_number(order, 1) else aten.masked_fill(summed / y, aten.eq(y, 0), 0)


def _norm_batch(
    size: Size, on: Sequence[bool], x: Value, order: Arg, dims: Arg, keepdim: Arg, dtype: torch.dtype | None
) -> Value:
    lifted, where, flat = reduced_batch(x, dims)
    return aten.linalg_vector_norm(lifted, order, where, keepdim and not flat, dtype=dtype)


declare(
    "aten.linalg_vector_norm.default",
    "reduction",
    vjp=_norm_vjp,
    jvp=_norm_jvp,
    batch=_norm_batch,
    cost=per_input(2),
    applies=lambda eqn: len(eqn.args) < 2 or is_number(eqn.args[1], 1) or is_number(eqn.args[1], 2),
)

# --- scans ----------------------------------------------------------------------------------------


def _cumsum_vjp(ct: Value, y: Value, x: Value, dim: int, dtype: torch.dtype | None) -> tuple:
    if not x.ndim:
        return (ct,)
    return (lambda: aten.flip(aten.cumsum(aten.flip(cast(ct, x.dtype), [dim]), dim), [dim]),)


along(
    "aten.cumsum.default",
    "scan",
    vjp=_cumsum_vjp,
    jvp=lambda ts, y, x, dim, dtype: aten.cumsum(ts[0], dim, dtype=dtype),
)


def _cumprod_jvp(ts: Sequence[Value], y: Value, x: Value, dim: int, dtype: torch.dtype | None) -> Value:
    """Products of dual numbers, by doubling: element i holds what the `step` elements up to it give.

    PyTorch's tangent divides by x and mends the zeros afterwards, which its own derivative does not survive. Sums
    and products alone are right at any order.
    """
    t, p = cast(ts[0], y.dtype), cast(x, y.dtype)
    if not x.ndim:
        return t
    size, before = x.shape[dim], [0] * (2 * (x.ndim - 1 - dim % x.ndim))
    step = 1
    while step < size:
        past_p, past_t = (
            aten.constant_pad_nd(aten.slice(v, dim, 0, size - step), [*before, step, 0], neutral)
            for v, neutral in ((p, 1), (t, 0))
        )
        t, p = t * past_p + p * past_t, p * past_p
        step *= 2
    return t


along(
    "aten.cumprod.default",
    "scan",
    vjp=cumprod_vjp,
    jvp=_cumprod_jvp,
    real=False,
    applies=lambda eqn: all(isinstance(n, int) for n in eqn.out.shape),  # the number of steps is part of the program
)
along("aten.logcumsumexp.default", "scan")

# --- no derivative --------------------------------------------------------------------------------

_over_all("aten.any.default", lambda x, dims: aten.any(x, dims), zero=True)
_over_all("aten.all.default", lambda x, dims: aten.all(x, dims), zero=True)
declare("aten.count_nonzero.default", "reduction", zero=True)


def _truth_of_dims(name: str) -> None:
    """any and all, unlike other reductions, reduce nothing where the list of dimensions is empty."""

    def batch(size: Size, on: Sequence[bool], x: Value, dims: Arg, keepdim: bool) -> Value:
        if dims == []:
            return again(x, [], False)
        lifted, where, flat = reduced_batch(x, dims)
        return again(lifted, where, keepdim and not flat)

    again = getattr(aten, name)
    declare(f"aten.{name}.dims", "reduction", batch=batch, cost=per_input(), zero=True)


for _name in ("any", "all"):
    reduction(f"aten.{_name}.dim", single=True, zero=True)
    _truth_of_dims(_name)
reduction("aten.count_nonzero.dim_IntList", keep="", zero=True)


def _arg_extreme(name: str) -> None:
    def batch(size: Size, on: Sequence[bool], x: Value, dim: int | None, keepdim: bool) -> Value:
        if x.ndim == 1:
            return aten.new_zeros(x, [size], dtype=torch.int64)
        if dim is not None:
            return again(x, shifted(dim, x), keepdim)
        out = again(aten.flatten(x, 1), 1)
        for _ in range(x.ndim - 1 if keepdim else 0):
            out = aten.unsqueeze(out, -1)
        return out

    again = getattr(aten, name)
    declare(f"aten.{name}", "reduction", batch=batch, cost=per_input(), zero=True)


_arg_extreme("argmax")
_arg_extreme("argmin")
