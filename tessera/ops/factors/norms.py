"""Sharding rules of normalisations: what they take statistics over must be whole, or is taken apart.

A batch norm's statistics are those of the whole batch: it becomes sums, which ranks share.
"""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ops.factors.rule import Cut, Factors, Local, decomposed, in_words, rule, tensors
from tessera.ops.families import product


def _lead(x: Value, tail: int) -> tuple[str, str]:
    """Names of the dimensions before and of those that are normalised."""
    return " ".join(f"b{i}" for i in range(x.ndim - tail)), " ".join(f"n{i}!" for i in range(tail))


@rule("native_layer_norm layer_norm rms_norm _fused_rms_norm")
def layer_norm(eqn: Equation) -> Factors | None:
    x, *params = tensors(eqn)
    tail = len(eqn.args[1])  # type: ignore[arg-type]
    lead, last = _lead(x, tail)
    ones = " ".join(["1"] * tail)
    left = ", ".join([f"{lead} {last}", *[last] * len(params)])
    statistics = [f"{lead} {ones}"] * (len(eqn.outputs) - 1)
    return in_words(eqn, f"{left} -> {', '.join([f'{lead} {last}', *statistics])}")


@rule("native_layer_norm_backward _fused_rms_norm_backward")
def layer_norm_backward(eqn: Equation) -> Factors | None:
    ct, x, *rest = tensors(eqn)
    tail = len(eqn.bound()[0][2])
    lead, last = _lead(x, tail)
    ones = " ".join(["1"] * tail)
    statistics = 2 if eqn.opname == "native_layer_norm_backward" else 1
    left = [f"{lead} {last}"] * 2 + [f"{lead} {ones}"] * statistics + [last] * (len(rest) - statistics)
    right = [f"{lead} {last}", *[last] * (len(eqn.outputs) - 1)]
    there = [text if v is not None else "" for text, v in zip(right, eqn.outputs, strict=True)]
    return in_words(eqn, f"{', '.join(left)} -> {', '.join(there)}", sums=lead, linear=((0,),))


@rule("group_norm")
def group_norm(eqn: Equation) -> Factors | None:
    x, *params = tensors(eqn)
    rows = _images(x)
    return in_words(eqn, f"{', '.join([rows, *['c!'] * len(params)])} -> {rows}")


@rule("native_group_norm")
def native_group_norm(eqn: Equation) -> Factors | None:
    x, *params = tensors(eqn)
    rows = _images(x)
    left = ", ".join([rows, *["c!"] * len(params)])
    return in_words(eqn, f"{left} -> {rows}, b g!, b g!", local=_rows_named(3))


@rule("native_group_norm_backward")
def native_group_norm_backward(eqn: Equation) -> Factors | None:
    ct, _, _, _, *weight = tensors(eqn)
    rows = _images(ct)
    left = ", ".join([rows, rows, "b g!", "b g!", *["c!"] * len(weight)])
    there = [text if v is not None else "" for text, v in zip([rows, "c!", "c!"], eqn.outputs, strict=True)]
    return in_words(eqn, f"{left} -> {', '.join(there)}", sums="b", linear=((0,),), local=_rows_named(5))


def _images(x: Value) -> str:
    return " ".join(["b", "c!", *(f"s{i}!" for i in range(x.ndim - 2))])


def _rows_named(at: int) -> Local:
    """The argument there is the number of rows, of which a rank has some."""

    def here(eqn: Equation, cut: Cut) -> object:
        args = list(eqn.bound()[0])
        args[at] = tensors(eqn)[0].shape[0]
        return getattr(aten, eqn.opname)(*args)

    return here


# --- batch norms ----------------------------------------------------------------------------------


def _channels(x: Value, v: Value) -> Value:
    """A vector over channels, so that it broadcasts against x."""
    return aten.view(v, [1, v.shape[0], *[1] * (x.ndim - 2)])


def _over(x: Value) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def _scaled(y: Value, weight: Value | None, bias: Value | None) -> Value:
    y = y if weight is None else aten.mul(y, _channels(y, weight))
    return y if bias is None else aten.add(y, _channels(y, bias))


@decomposed("_native_batch_norm_legit_functional native_batch_norm")
def batch_norm(eqn: Equation) -> object:
    x, weight, bias, running_mean, running_var, training, momentum, eps = eqn.bound()[0]
    if x.ndim < 2:
        return None
    if not training:
        scale = aten.rsqrt(aten.add(running_var, eps))
        y = aten.mul(aten.sub(x, _channels(x, running_mean)), _channels(x, scale))
        return [_scaled(y, weight, bias), *_left_alone(eqn, x, running_mean, running_var)]
    dims = _over(x)
    count = product([x.shape[d] for d in dims])
    mean = aten.mean(x, dims)
    off = aten.sub(x, _channels(x, mean))
    variance = aten.mean(aten.mul(off, off), dims)
    rstd = aten.rsqrt(aten.add(variance, eps))
    y = _scaled(aten.mul(off, _channels(x, rstd)), weight, bias)
    if eqn.opname == "native_batch_norm":
        return [y, mean, rstd]
    unbiased = aten.mul(variance, count / (count - 1))
    new_mean = aten.add(aten.mul(running_mean, 1 - momentum), aten.mul(mean, momentum))
    new_var = aten.add(aten.mul(running_var, 1 - momentum), aten.mul(unbiased, momentum))
    return [y, mean, rstd, new_mean, new_var]


def _left_alone(eqn: Equation, x: Value, mean: Value, var: Value) -> list[Value]:
    empty = [aten.new_zeros(x, [0]), aten.new_zeros(x, [0])]
    return empty if len(eqn.outputs) == 3 else [*empty, aten.clone(mean), aten.clone(var)]


@decomposed("native_batch_norm_backward batch_norm_backward")
def batch_norm_backward(eqn: Equation) -> object:
    if eqn.opname != "native_batch_norm_backward":
        return None
    ct, x, weight, running_mean, running_var, mean, rstd, training, eps, wanted = eqn.bound()[0]
    if x.ndim < 2:
        return None
    dims = _over(x)
    if not training:
        mean, rstd = running_mean, aten.rsqrt(aten.add(running_var, eps))
    normal = aten.mul(aten.sub(x, _channels(x, mean)), _channels(x, rstd))
    d_bias = aten.sum(ct, dims)
    d_weight = aten.sum(aten.mul(ct, normal), dims)
    scale = rstd if weight is None else aten.mul(rstd, weight)
    if training:
        count = product([x.shape[d] for d in dims])
        pulled = aten.mul(normal, _channels(x, aten.div(d_weight, count)))
        ct = aten.sub(aten.sub(ct, _channels(x, aten.div(d_bias, count))), pulled)
    d_x = aten.mul(ct, _channels(x, scale))
    return [v if want else None for v, want in zip((d_x, d_weight, d_bias), wanted, strict=True)]
