"""Lowerings of activations and of their gradients, over the families of `lower_pointwise`."""

from __future__ import annotations

import math

from tessera.tile.from_trace_emit import T
from tessera.tile.lower_pointwise import clamp, flip, pointwise

SQRT_HALF, SQRT_2_OVER_PI, TWO_OVER_SQRT_PI = math.sqrt(0.5), math.sqrt(2 / math.pi), 2 / math.sqrt(math.pi)
CUBE = 0.044715  # of the tanh form of gelu


def _gelu(x: T, approximate: str = "none") -> T:
    if approximate == "none":
        return x * 0.5 * ((x * SQRT_HALF).fn("erf") + 1)
    return x * 0.5 * (((x + x * x * x * CUBE) * SQRT_2_OVER_PI).fn("tanh") + 1)


def _gelu_backward(g: T, x: T, approximate: str = "none") -> T:
    if approximate == "none":
        density = (x * x * -0.5).fn("exp") * (TWO_OVER_SQRT_PI * SQRT_HALF * 0.5)
        return g * (((x * SQRT_HALF).fn("erf") + 1) * 0.5 + x * density)
    t = ((x + x * x * x * CUBE) * SQRT_2_OVER_PI).fn("tanh")
    slope = (x * x * (3 * CUBE) + 1) * SQRT_2_OVER_PI
    return g * ((t + 1) * 0.5 + x * 0.5 * (1 - t * t) * slope)


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
pointwise("gelu", _gelu, expensive=True)
pointwise("gelu_backward", _gelu_backward, expensive=True)
pointwise("silu", lambda x: x * x.fn("sigmoid"), expensive=True)
pointwise("silu_backward", _silu_backward, expensive=True)
pointwise("sigmoid_backward", lambda g, y: g * (1 - y) * y)
pointwise("tanh_backward", lambda g, y: g * (1 - y * y))
pointwise("threshold", lambda x, level, value: (x <= level).where(value, x))
pointwise("threshold_backward", lambda g, x, level: (x <= level).where(0, g))
pointwise("leaky_relu", lambda x, slope=0.01: (x > 0).where(x, x * slope))
pointwise("leaky_relu_backward", lambda g, x, slope, is_result: (x > 0).where(g, g * slope))
pointwise("_prelu_kernel", lambda x, w: (x > 0).where(x, x * w))
pointwise("hardtanh", lambda x, low=-1, high=1: clamp(x, low, high))
pointwise("hardtanh_backward", lambda g, x, low, high: ((x <= low) | (x >= high)).where(0.0, g))
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
