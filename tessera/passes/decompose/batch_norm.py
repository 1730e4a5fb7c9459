"""Batch norm written out as arithmetic and reductions: in evaluation, in training, and its gradient.

As in `decompose_nn`, a rule gets the equation and its arguments bound to the schema. In training the data is read once
for the statistics and once to be normalised, with whatever follows; what a kernel needs for every channel is computed
beside the statistics. On a CPU the library takes the statistics of training, and the gradients are PyTorch's formula
written out, of which `decompose` knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.types import Size
from tessera.passes.decompose.nn import Results, affine, channels, out, rule, wide

LIBRARY = ("cpu",)  # devices where training is not written out here


def _rest(x: Value) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def _members(x: Value) -> Size:
    """Elements of a channel."""
    n: Size = 1
    for d in _rest(x):
        n = n * x.shape[d]
    return n


def _written_out(x: Value) -> bool:
    return x.ndim >= 2 and x.tensor.is_float and x.tensor.device.type not in LIBRARY


# --- evaluation -------------------------------------------------------------------------------------------


@rule("_native_batch_norm_legit_no_training")
def inference(
    eqn: Equation, x: Value, w: Value | None, b: Value | None, mean: Value, var: Value, momentum: float, eps: float
) -> Results:
    rstd = aten.rsqrt(aten.add(wide(var), eps))
    y = aten.mul(aten.sub(wide(x), channels(wide(mean), x)), channels(rstd, x))
    return [out(eqn, 0, affine(y, channels(w, x), channels(b, x))), None, None]


@rule("batch_norm")
def batch_norm(
    eqn: Equation,
    x: Value,
    w: Value | None,
    b: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    *_: object,
) -> Results:
    if training or mean is None or var is None:
        return None
    return inference(eqn, x, w, b, mean, var, momentum, eps)[:1]  # type: ignore[index]


# --- training ---------------------------------------------------------------------------------------------


@rule("_native_batch_norm_legit_functional")
def training(
    eqn: Equation,
    x: Value,
    w: Value | None,
    b: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> Results:
    """The result, the batch's mean and reciprocal deviation, and the new running statistics."""
    if not training or not _written_out(x):
        return None
    up = wide(x)
    y, mean, rstd, variance = _normalised(x, up, w, b, eps)
    n = _members(x)
    unbiased = aten.mul(variance, n / (n - 1)) if isinstance(n, int) and n > 1 else aten.var(up, _rest(x), correction=1)
    kept = [
        aten.add(aten.mul(wide(new), momentum), aten.mul(wide(old), 1 - momentum))
        for new, old in ((mean, running_mean), (unbiased, running_var))
    ]
    return [out(eqn, k, v) for k, v in enumerate((y, mean, rstd, *kept))]


@rule("_native_batch_norm_legit.no_stats")
def without_running_statistics(
    eqn: Equation, x: Value, w: Value | None, b: Value | None, training: bool, momentum: float, eps: float
) -> Results:
    if not training or not _written_out(x):
        return None
    y, mean, rstd, _ = _normalised(x, wide(x), w, b, eps)
    return [out(eqn, k, v) for k, v in enumerate((y, mean, rstd))]


@rule("native_batch_norm")
def native(
    eqn: Equation,
    x: Value,
    w: Value | None,
    b: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Results:
    if mean is not None or var is not None:  # in training it would write them
        return None
    return without_running_statistics(eqn, x, w, b, training, momentum, eps)


def _normalised(x: Value, up: Value, w: Value | None, b: Value | None, eps: float) -> tuple[Value, Value, Value, Value]:
    """The result, and the batch's mean, reciprocal deviation and variance; `up` is x with enough bits."""
    variance, mean = aten.var_mean(up, _rest(x), correction=0)
    rstd = aten.rsqrt(aten.add(variance, eps))
    y = aten.mul(aten.sub(up, channels(mean, x)), channels(rstd, x))
    return affine(y, channels(w, x), channels(b, x)), mean, rstd, variance


@rule("native_batch_norm_backward")
def backward(
    eqn: Equation,
    g: Value,
    x: Value,
    w: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_rstd: Value | None,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> Results:
    """With c = x - mean: dw = rstd sum(g c), db = sum(g), dx = w rstd (g - mean(g) - c rstd^2 mean(g c))."""
    mean, rstd = (save_mean, save_rstd) if training else (running_mean, running_var)
    if not _written_out(x) or mean is None or rstd is None:
        return None
    mean, rstd = wide(mean), wide(rstd)
    if not training:
        rstd = aten.rsqrt(aten.add(rstd, eps))
    g, rest, n = wide(g), _rest(x), _members(x)
    centred = aten.sub(wide(x), channels(mean, x))
    product = aten.mul(g, centred)
    total, along = aten.sum(g, rest), aten.sum(product, rest)
    scale = rstd if w is None else aten.mul(rstd, wide(w))
    left = g
    if training:
        both = ((g, total), (product, along))
        even, slope = (aten.div(s, n) if isinstance(n, int) else aten.mean(v, rest) for v, s in both)
        slope = aten.mul(slope, aten.mul(rstd, rstd))
        left = aten.sub(aten.sub(g, channels(even, x)), aten.mul(centred, channels(slope, x)))
    dx = aten.mul(left, channels(scale, x))
    return [out(eqn, k, v) for k, v in enumerate((dx, aten.mul(along, rstd), total))]
