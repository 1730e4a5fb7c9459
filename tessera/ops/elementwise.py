"""Pointwise operators: arithmetic, powers and logarithms, trigonometry, special functions, comparisons.

Each line gives an operator's derivative; the family gives the rest. Where PyTorch's own formula uses the
result `y`, so does ours: the result is saved anyway, its argument need not be. Points where a derivative is a
matter of choice (ties, zeros, NaN) follow PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Value
from tessera.ops.families import (
    binary,
    differentiated_again,
    is_number,
    or_zeros,
    pointwise,
    predicate,
    select,
    step,
    times,
    total,
    unary,
)  # fmt: skip
from tessera.ops.tied import TIED

LN2, LN10, TWO_OVER_SQRT_PI = math.log(2), math.log(10), 2 / math.sqrt(math.pi)

# --- trigonometry ---------------------------------------------------------------------------------

unary("aten.sin", d=lambda x, y: aten.cos(x))
unary("aten.cos", by=lambda t, x, y: t * -aten.sin(x))
unary("aten.tan", d=lambda x, y: y * y + 1)
unary("aten.asin", d=lambda x, y: aten.rsqrt(1 - x * x))
unary("aten.acos", by=lambda t, x, y: t * -aten.rsqrt(1 - x * x))
unary("aten.atan", by=lambda t, x, y: t / (x * x + 1))
unary("aten.sinh", d=lambda x, y: aten.cosh(x))
unary("aten.cosh", d=lambda x, y: aten.sinh(x))
unary("aten.asinh", d=lambda x, y: aten.rsqrt(x * x + 1))
unary("aten.acosh", d=lambda x, y: aten.rsqrt(x * x - 1))
unary("aten.atanh", by=lambda t, x, y: t / (1 - x * x))
unary("aten.deg2rad", d=lambda x, y: math.pi / 180)
unary("aten.rad2deg", d=lambda x, y: 180 / math.pi)


def _sinc(x: Value, y: Value) -> Value:
    """At zero by its series, and elsewhere of something else than zero: so both can be differentiated again."""
    origin = aten.eq(x * math.pi, 0)
    away = aten.masked_fill(x, origin, 1)
    px = away * math.pi
    slope = (px * aten.cos(px) - aten.sin(px)) / (px * away)
    return aten.where(origin, x * (x * x * (math.pi**4 / 30) - math.pi**2 / 3), slope)


unary("aten.sinc", d=_sinc, cost=12)

# --- exponentials, logarithms, roots --------------------------------------------------------------

unary("aten.exp", d=lambda x, y: y)
unary("aten.exp2", d=lambda x, y: y * LN2)
unary("aten.expm1", d=lambda x, y: y + 1)
unary("aten.log", by=lambda t, x, y: t / x)
unary("aten.log2", by=lambda t, x, y: t / (x * LN2))
unary("aten.log10", by=lambda t, x, y: t / (x * LN10))
unary("aten.log1p", by=lambda t, x, y: t / (x + 1))
unary("aten.sqrt", by=lambda t, x, y: t / (y * 2))
unary("aten.rsqrt", by=lambda t, x, y: t * -0.5 * aten.pow(y, 3))
unary("aten.reciprocal", by=lambda t, x, y: -t * (y * y))
binary(
    "aten.logaddexp",
    by=(lambda t, a, b, y: t / (aten.exp(b - a) + 1), lambda t, a, b, y: t / (aten.exp(a - b) + 1)),
    cost=16,
)
binary(
    "aten.logaddexp2",
    by=(lambda t, a, b, y: t / (aten.exp2(b - a) + 1), lambda t, a, b, y: t / (aten.exp2(a - b) + 1)),
    cost=16,
)

# --- special functions ----------------------------------------------------------------------------

unary("aten.erf", by=lambda t, x, y: aten.exp(-(x * x)) * TWO_OVER_SQRT_PI * t)
unary("aten.erfc", by=lambda t, x, y: aten.exp(-(x * x)) * -TWO_OVER_SQRT_PI * t)
unary("aten.erfinv", d=lambda x, y: aten.exp(y * y) * (math.sqrt(math.pi) / 2), cost=24)
unary("aten.special_erfcx", d=lambda x, y: y * x * 2 - TWO_OVER_SQRT_PI, cost=24)
unary("aten.special_ndtri", d=lambda x, y: aten.exp(y * y / 2) * math.sqrt(2 * math.pi), cost=24)
unary("aten.lgamma", d=lambda x, y: aten.digamma(x), cost=24)
unary("aten.digamma", d=lambda x, y: aten.polygamma(1, x), cost=24)
unary("aten.i0", d=lambda x, y: aten.special_i1(x), cost=24)
unary("aten.special_i0e", d=lambda x, y: aten.special_i1e(x) - aten.sgn(x) * y, cost=24)
unary("aten.special_entr", d=lambda x, y: -aten.log(x) - 1, cost=8)
pointwise(
    "aten.polygamma", [None, lambda t, y, n, x: t * aten.polygamma(n + 1, x)], family="unary", cost=48
)  # polygamma(n, x): the order comes first

# --- sign, rounding, parts ------------------------------------------------------------------------

unary("aten.neg", d=lambda x, y: -1)
unary("aten.abs", d=lambda x, y: aten.sgn(x))
unary("aten.frac", d=lambda x, y: 1)
unary("aten.nan_to_num", by=lambda t, x, y, nan, pos, neg: aten.mul(t, aten.isfinite(x)))
for _name in ("sign", "sgn", "floor", "ceil", "trunc", "round"):
    step(f"aten.{_name}")


def _copysign(t: Value, y: Value, a: Value, b: Arg) -> Value:
    return t * aten.masked_fill(y / a, aten.eq(a, 0), 0)


pointwise("aten.copysign", [_copysign, lambda t, y, a, b: aten.zeros_like(t)], family="binary")

# --- arithmetic -----------------------------------------------------------------------------------
# A second operand may be a Python number; its derivative is then never asked for.

binary("aten.add", d=(lambda a, b, y, alpha=1: 1, lambda a, b, y, alpha=1: alpha))
binary("aten.sub", by=(lambda t, a, b, y, alpha=1: t, lambda t, a, b, y, alpha=1: times(-t, alpha)))
binary("aten.rsub", by=(lambda t, a, b, y, alpha=1: times(-t, alpha), lambda t, a, b, y, alpha=1: t))
binary("aten.mul", d=(lambda a, b, y: b, lambda a, b, y: a))


def _div(t: Value, a: Value, b: Arg, y: Value, rounding_mode: str | None = None) -> Value:
    return t / b if rounding_mode is None else aten.zeros_like(t)


def _div_by(t: Value, a: Value, b: Value, y: Value, rounding_mode: str | None = None) -> Value:
    return -t * ((a / b) / b) if rounding_mode is None else aten.zeros_like(t)


def _div_jvp(ts: Sequence[Value | None], y: Value, a: Value, b: Arg, rounding_mode: str | None = None) -> Value:
    """PyTorch's tangent reads the result: where the divisor is zero, that decides between infinity and NaN."""
    if rounding_mode is not None:
        return aten.zeros_like(y)
    top, bottom = ts
    change = top if bottom is None else -(bottom * y) if top is None else top - bottom * y
    return change / b  # type: ignore[operator]


binary("aten.div", by=(_div, _div_by), jvp=_div_jvp)
binary("aten.fmod", by=(lambda t, a, b, y: t, lambda t, a, b, y: -t * aten.div(a, b, rounding_mode="trunc")))
binary("aten.hypot", by=(lambda t, a, b, y: t * (a / y), lambda t, a, b, y: t * (b / y)), cost=8)


def _remainder_by(t: Value, a: Arg, b: Value, y: Value) -> Value:
    if isinstance(a, Value):
        return -t * aten.div(a, b, rounding_mode="floor")
    return -t * aten.floor(aten.reciprocal(b) * a)


binary("aten.remainder.Tensor", by=(lambda t, a, b, y: t, _remainder_by))
binary("aten.remainder.Scalar", by=(lambda t, a, b, y: t,))


def _atan2(t: Value, other: Value, a: Value, b: Value) -> Value:
    """Zero at the origin, as PyTorch has it."""
    square = a * a + b * b
    return t * (other * aten.masked_fill(aten.reciprocal(square), aten.eq(square, 0), 0))


def _atan2_jvp(ts: Sequence[Value | None], y: Value, a: Value, b: Value) -> Value:
    """NaN at the origin, unlike the gradients."""
    ta, tb = ts
    return total([None if tb is None else -(a * tb), None if ta is None else b * ta]) / (a * a + b * b)


binary(
    "aten.atan2",
    by=(lambda t, a, b, y: _atan2(t, b, a, b), lambda t, a, b, y: -_atan2(t, a, a, b)),
    jvp=_atan2_jvp,
)


def _pow(t: Value, x: Value, e: Arg, y: Value) -> Value:
    if isinstance(e, Value):
        return select(aten.ne(e, 0), t * (e * aten.pow(x, e - 1)))
    if is_number(e, 0):
        return aten.zeros_like(t)
    if is_number(e, 1):
        return emit(TIED, t, x)
    if is_number(e, 2) and not differentiated_again():  # else x ** 1 shows in the next derivative, as in eager
        return t * (x * 2)
    return t * (aten.pow(x, e - 1) * e)  # type: ignore[operator]


def _pow_exponent(t: Value, x: Arg, e: Value, y: Value) -> Value:
    """0 ** e stays 0 as a positive e moves, where y * log(0) would be NaN."""
    if isinstance(x, Value):
        flat = aten.logical_and(aten.eq(x, 0), aten.ge(e, 0))
        return t * aten.masked_fill(y * aten.log(x), flat, 0)
    if is_number(x, 0):
        return t * aten.masked_fill(y * -math.inf, aten.ge(e, 0), 0)
    return t * (y * math.log(x))  # type: ignore[arg-type]


binary("aten.pow.Tensor_Scalar", by=(_pow,), cost=12)  # most are a product or two
binary("aten.pow.Tensor_Tensor", by=(_pow, _pow_exponent))
binary(
    "aten.pow.Scalar",
    by=(_pow, _pow_exponent),
    cost=12,
    applies=lambda eqn: type(eqn.args[0]) in (int, float) and eqn.args[0] >= 0,
)


def _xlogy(t: Value, a: Value, b: Arg, y: Value) -> Value:
    if isinstance(b, Value):
        gone = aten.logical_and(aten.eq(a, 0), aten.le(b, 0))
        return aten.masked_fill(aten.xlogy(t, b), gone, 0)
    return aten.masked_fill(aten.xlogy(t, b), aten.eq(a, 0), 0) if b <= 0 else aten.xlogy(t, b)  # type: ignore[operator]


binary("aten.xlogy.Tensor", by=(_xlogy, lambda t, a, b, y: t * a / b), cost=12)

# --- three operands -------------------------------------------------------------------------------


def _rest(w: Arg) -> Arg:
    return 1 - w  # type: ignore[operator]


def _lerp_jvp(ts: Sequence[Value | None], y: Value, a: Value, b: Value, w: Arg) -> Value:
    """lerp is exact where the weight is infinite and the ends are equal; the sum of two products is not."""
    ta, tb, tw = (*ts, None)[:3]
    moved = None if ta is None and tb is None else aten.lerp(or_zeros(ta, a), or_zeros(tb, b), w)
    return total([moved, None if tw is None else tw * (b - a)])


def _addcdiv_jvp(ts: Sequence[Value | None], y: Value, x: Value, a: Value, b: Value, value: Arg) -> Value:
    tx, ta, tb = ts
    moved = None if ta is None else times(ta / b, value)
    return total([tx, moved, None if tb is None else -times(tb * (a / b) / b, value)])


pointwise(
    "aten.lerp",
    [lambda t, y, a, b, w: t * _rest(w), lambda t, y, a, b, w: t * w, lambda t, y, a, b, w: t * (b - a)],
    cost=3,
    jvp=_lerp_jvp,
)
pointwise(
    "aten.addcmul",
    [
        lambda t, y, x, a, b, value: t,
        lambda t, y, x, a, b, value: times(t * b, value),
        lambda t, y, x, a, b, value: times(t * a, value),
    ],
    cost=3,
)
pointwise(
    "aten.addcdiv",
    [
        lambda t, y, x, a, b, value: t,
        lambda t, y, x, a, b, value: times(t, value) / b,
        lambda t, y, x, a, b, value: times(-t, value) * (a / (b * b)),
    ],
    cost=3,
    jvp=_addcdiv_jvp,
)

# --- comparisons, logic, integers: no derivative --------------------------------------------------

for _name in (
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not",
    "isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit", "gcd", "lcm", "bitwise_and",
    "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift",
):  # fmt: skip
    predicate(f"aten.{_name}")
