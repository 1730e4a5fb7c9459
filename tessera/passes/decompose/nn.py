"""Softmaxes and norms written out as arithmetic and reductions.

A rule gets the equation and its arguments bound to the schema, and gives the results in order (None where the
equation has none), or None where it does not apply. Half precision is widened first, as PyTorch's kernels do. Variances
are taken of what is left after the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.types import Size, size_hint
from tessera.ops.families import cast

Results = list[Value | None] | Value | None
Rule = Callable[..., Results]

DECOMPOSITIONS: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    def add(fn: Rule) -> Rule:
        DECOMPOSITIONS.update(dict.fromkeys(names.split(), fn))
        return fn

    return add


def wide(x: Value) -> Value:
    return cast(x, torch.promote_types(x.dtype, torch.float32))


def out(eqn: Equation, k: int, v: Value | None) -> Value | None:
    """A result in the dtype the equation gives it."""
    old = eqn.outputs[k]
    return None if old is None or v is None else cast(v, old.dtype)


# --- softmax --------------------------------------------------------------------------------------------


def _shifted(x: Value, dim: int) -> tuple[Value, Value]:
    """x - max and the sum of its exponentials."""
    left = aten.sub(x, aten.amax(x, [dim], True))
    return left, aten.exp(left)


def _declined(eqn: Equation, x: Value, dim: int) -> bool:
    """Scalars, whole numbers, and rows of no elements, which have no largest one."""
    if not x.ndim or not eqn.outputs[0].tensor.is_float:  # type: ignore[union-attr]
        return True
    return size_hint(x.shape[dim]) == 0


@rule("_softmax softmax.int")
def softmax(eqn: Equation, x: Value, dim: int, option: object = None) -> Results:
    if _declined(eqn, x, dim):
        return None
    _, e = _shifted(wide(cast_for(x, option)), dim)
    return [out(eqn, 0, aten.div(e, aten.sum(e, [dim], True)))]


@rule("_safe_softmax")
def safe_softmax(eqn: Equation, x: Value, dim: int, option: object = None) -> Results:
    """Zeros where a whole row is masked by -inf."""
    if _declined(eqn, x, dim):
        return None
    x = wide(cast_for(x, option))
    top = aten.amax(x, [dim], True)
    e = aten.exp(aten.sub(x, top))
    zero = aten.full([], 0.0, dtype=x.dtype, device=x.tensor.device)
    return [out(eqn, 0, aten.where(aten.eq(top, -math.inf), zero, aten.div(e, aten.sum(e, [dim], True))))]


@rule("_log_softmax log_softmax.int")
def log_softmax(eqn: Equation, x: Value, dim: int, option: object = None) -> Results:
    if _declined(eqn, x, dim):
        return None
    left, e = _shifted(wide(cast_for(x, option)), dim)
    return [out(eqn, 0, aten.sub(left, aten.log(aten.sum(e, [dim], True))))]


def cast_for(x: Value, option: object) -> Value:
    """The composite forms name a dtype to compute in; the native ones only say whether half becomes single."""
    return cast(x, option) if isinstance(option, torch.dtype) else x


@rule("_softmax_backward_data")
def softmax_backward(eqn: Equation, g: Value, y: Value, dim: int, dtype: torch.dtype) -> Results:
    if not y.ndim:
        return None
    g, y = wide(g), wide(y)
    gy = aten.mul(y, g)  # in the layout of the softmax, which was computed from what is in memory
    return [out(eqn, 0, aten.sub(gy, aten.mul(y, aten.sum(gy, [dim], True))))]


@rule("_log_softmax_backward_data")
def log_softmax_backward(eqn: Equation, g: Value, y: Value, dim: int, dtype: torch.dtype) -> Results:
    if not y.ndim:
        return None
    g = wide(g)
    return [out(eqn, 0, less_share(g, y, aten.sum(g, [dim], True)))]


def less_share(g: Value, y: Value, total: Value) -> Value:
    """g, less every element's share of its row's total; in the layout of y, the logarithm of the shares."""
    return aten.add(aten.mul(aten.exp(wide(y)), aten.neg(total)), g)


# --- norms over the last dimensions -----------------------------------------------------------------------


def _last(shape: Sequence[Size]) -> list[int]:
    return list(range(-len(shape), 0))


def affine(y: Value, w: Value | None, b: Value | None) -> Value:
    y = y if w is None else aten.mul(y, w)
    return y if b is None else aten.add(y, b)


@rule("native_layer_norm layer_norm")
def layer_norm(
    eqn: Equation, x: Value, shape: Sequence[Size], w: Value | None, b: Value | None, eps: float, *_: object
) -> Results:
    x = wide(x)
    variance, mean = aten.var_mean(x, _last(shape), correction=0, keepdim=True)
    rstd = aten.rsqrt(aten.add(variance, eps))
    y = affine(aten.mul(aten.sub(x, mean), rstd), w, b)
    if not eqn.many:
        return [out(eqn, 0, y)]
    return [out(eqn, 0, y), out(eqn, 1, mean), out(eqn, 2, rstd)]


@rule("native_layer_norm_backward")
def layer_norm_backward(
    eqn: Equation,
    g: Value,
    x: Value,
    shape: Sequence[Size],
    mean: Value,
    rstd: Value,
    w: Value | None,
    b: Value | None,
    mask: Sequence[bool],
) -> Results:
    g, x, mean, rstd = wide(g), wide(x), wide(mean), wide(rstd)
    if mean.ndim != x.ndim:
        return None
    unit = aten.mul(aten.sub(x, mean), rstd)
    dx = _norm_backward(g, unit, rstd, w, _last(shape), centred=True) if eqn.outputs[0] is not None else None
    outer = list(range(x.ndim - len(shape)))
    dw = _total(aten.mul(g, unit), outer) if eqn.outputs[1] is not None else None
    db = _total(g, outer) if eqn.outputs[2] is not None else None
    return [out(eqn, 0, dx), out(eqn, 1, dw), out(eqn, 2, db)]


def _norm_backward(g: Value, unit: Value, rstd: Value, w: Value | None, dims: list[int], centred: bool) -> Value:
    """rstd * (g w - mean(g w) - unit * mean(g w unit)); a norm that takes no mean off has no second term."""
    gw = g if w is None else aten.mul(g, wide(w))
    along = aten.mul(unit, aten.mean(aten.mul(gw, unit), dims, True))
    left = aten.sub(gw, aten.mean(gw, dims, True)) if centred else gw
    return aten.mul(aten.sub(left, along), rstd)


def _total(x: Value, dims: list[int]) -> Value:
    return aten.sum(x, dims) if dims else aten.clone(x)


@rule("_fused_rms_norm rms_norm")
def rms_norm(eqn: Equation, x: Value, shape: Sequence[Size], w: Value | None, eps: float | None) -> Results:
    if eps is None:
        if x.dtype not in (torch.float32, torch.float64):
            return None
        eps = torch.finfo(x.dtype).eps
    x = wide(x)
    rstd = aten.rsqrt(aten.add(aten.mean(aten.mul(x, x), _last(shape), True), eps))
    y = affine(aten.mul(x, rstd), w, None)
    return [out(eqn, 0, y), out(eqn, 1, rstd)] if eqn.many else [out(eqn, 0, y)]


@rule("_fused_rms_norm_backward")
def rms_norm_backward(
    eqn: Equation, g: Value, x: Value, shape: Sequence[Size], rstd: Value, w: Value | None, mask: Sequence[bool]
) -> Results:
    g, x, rstd = wide(g), wide(x), wide(rstd)
    if rstd.ndim != x.ndim:
        return None
    unit = aten.mul(x, rstd)
    dx = _norm_backward(g, unit, rstd, w, _last(shape), centred=False) if eqn.outputs[0] is not None else None
    outer = list(range(x.ndim - len(shape)))
    dw = _total(aten.mul(g, unit), outer) if eqn.outputs[1] is not None else None
    return [out(eqn, 0, dx), out(eqn, 1, dw)]


# --- norms over groups of channels ------------------------------------------------------------------------


def channels(v: Value | None, x: Value) -> Value | None:
    """One number a channel, to stand beside [N, C, …]."""
    return None if v is None else aten.view(v, [v.shape[0], *[1] * (x.ndim - 2)])
