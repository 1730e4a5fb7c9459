"""Lowerings of activations and of their gradients, over the families of `lower_pointwise`."""

from __future__ import annotations

import math
from collections.abc import Callable

from tessera.tile.from_trace.lower.pointwise import clamp, flip, pointwise
from tessera.tile.from_trace.values import T

SQRT_HALF, SQRT_2_OVER_PI, TWO_OVER_SQRT_PI = math.sqrt(0.5), math.sqrt(2 / math.pi), 2 / math.sqrt(math.pi)
CUBE = 0.044715  # of the tanh form of gelu


# log2(erfc(z)) / z on [0, 4.5], and beyond that below -32 / z; lowest power first.
LOG2_ERFC = (
    -1.6280632, -0.9170816, -0.15242986, 0.033910368, -0.0052236626, 0.000486097, -2.0318083e-05,
)  # fmt: skip


def erfc_of_minus(y: T) -> T:
    """1 + erf(y) for results of 16 bits: one exponential, and within 1e-5 of itself down to 1e-9, within 1e-9 below.

    That is a fiftieth of what rounding a gelu to bf16 takes off, and far less in the tail than 1 + erf(y) cancels.
    """
    z = y.fn("abs")
    log = z.fn("fma", LOG2_ERFC[-1], LOG2_ERFC[-2])
    for c in reversed(LOG2_ERFC[:-2]):
        log = log.fn("fma", z, c)
    tail = (log * z).fn("exp2")
    return (y >= 0).where(2 - tail, tail)


def _one_plus_erf(y: T) -> T:
    return y.fn("erf") + 1


def _gelu_by(one_plus_erf: Callable[[T], T]) -> Callable[..., T]:
    def gelu(x: T, approximate: str = "none") -> T:
        if approximate == "none":
            return x * 0.5 * one_plus_erf(x * SQRT_HALF)
        return x * _tanh_cdf(x)

    return gelu


def _tanh_cdf(x: T) -> T:
    """(1 + tanh(u)) / 2, which is sigmoid(2 u) and cancels nowhere."""
    return ((x + x * x * x * CUBE) * (2 * SQRT_2_OVER_PI)).fn("sigmoid")


def _gelu_backward_by(one_plus_erf: Callable[[T], T]) -> Callable[..., T]:
    def backward(g: T, x: T, approximate: str = "none") -> T:
        if approximate == "none":
            density = (x * x * -0.5).fn("exp") * (TWO_OVER_SQRT_PI * SQRT_HALF * 0.5)
            return g * (one_plus_erf(x * SQRT_HALF) * 0.5 + x * density)
        s = _tanh_cdf(x)
        slope = (x * x * (3 * CUBE) + 1) * (2 * SQRT_2_OVER_PI)
        return g * (s + x * s * (1 - s) * slope)

    return backward


def _silu_backward(g: T, x: T) -> T:
    s = x.fn("sigmoid")
    return g * s * (x * (1 - s) + 1)


def _softplus(x: T, beta: float = 1, threshold: float = 20) -> T:
    return (x * beta > threshold).where(x, (x * beta).fn("exp").fn("log1p") / beta)


def _elu(x: T, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> T:
    return (x > 0).where(x * scale, (x * input_scale).fn("expm1") * (alpha * scale))


def _elu_backward(g: T, alpha: float, scale: float, input_scale: float, is_result: bool, x: T) -> T:
    if is_result:
        return (x <= 0).where(g * input_scale * (x + alpha * scale), g * scale)
    return (x <= 0).where(g * (input_scale * alpha * scale) * (x * input_scale).fn("exp"), g * scale)


def _hardswish_backward(g: T, x: T) -> T:
    return (x <= -3).where(0.0, (x < 3).where(g * (x / 3 + 0.5), g))


def _mish(x: T) -> T:
    return x * _softplus(x).fn("tanh")


def _xlogy(a: T | float, b: T | float) -> T:
    x, y = flip(a, b)
    y = x.like(y)
    return y.fn("isnan").where(math.nan, x.eq(0).where(0.0, x * y.fn("log")))


pointwise("relu", lambda x: x.fn("maximum", 0))
pointwise("relu6", lambda x: clamp(x, 0, 6))
pointwise("gelu", _gelu_by(_one_plus_erf), expensive=True, narrow=_gelu_by(erfc_of_minus))
pointwise("gelu_backward", _gelu_backward_by(_one_plus_erf), expensive=True, narrow=_gelu_backward_by(erfc_of_minus))
pointwise("silu", lambda x: x * x.fn("sigmoid"), expensive=True)
pointwise("silu_backward", _silu_backward, expensive=True)
pointwise("sigmoid_backward", lambda g, y: g * (1 - y) * y)
pointwise("tanh_backward", lambda g, y: g * (1 - y * y))
pointwise("threshold", lambda x, level, value: (x <= level).where(value, x))
pointwise("threshold_backward", lambda g, x, level: (x <= level).where(0, g))
pointwise("leaky_relu", lambda x, slope=0.01: (x > 0).where(x, x * slope))
pointwise("leaky_relu_backward", lambda g, x, slope, is_result: (x > 0).where(g, g * slope))
pointwise("_prelu_kernel", lambda x, w: (x > 0).where(x, x * w))
pointwise("hardtanh", lambda x, low=-1, high=1: clamp(x, low, high), sharp=True)
pointwise("hardtanh_backward", lambda g, x, low, high: ((x <= low) | (x >= high)).where(0.0, g), sharp=True)
pointwise("hardsigmoid", lambda x: clamp(x + 3, 0, 6) / 6)
pointwise("hardsigmoid_backward", lambda g, x: ((x > -3) & (x < 3)).where(g / 6, 0.0))
pointwise("hardswish", lambda x: x * clamp(x + 3, 0, 6) / 6)
pointwise("hardswish_backward", _hardswish_backward)
pointwise("softplus", _softplus, expensive=True)
pointwise(
    "softplus_backward",
    lambda g, x, beta, t: (x * beta > t).where(g, g * (x * beta).fn("sigmoid")),
    expensive=True,
)
pointwise("elu", _elu, expensive=True)
pointwise("elu_backward", _elu_backward, expensive=True)
pointwise("mish", _mish, expensive=True)
pointwise("xlogy", _xlogy, expensive=True)
