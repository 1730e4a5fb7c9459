"""Activations. What an opset has no operator for is arithmetic."""

from __future__ import annotations

import math

import torch

from tessera.exporters.onnx.forms.common import axis, need
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import form


@form("relu")
def relu(g: Graph, x: Ref) -> Ref:
    return g.op("Relu", x) if x.is_float else g.op("Max", x, g.full(0, x.dtype))


@form("relu6")
def relu6(g: Graph, x: Ref) -> Ref:
    return g.op("Min", g.op("Max", x, g.full(0, x.dtype)), g.full(6, x.dtype))


@form("hardtanh")
def hardtanh(g: Graph, x: Ref, low: float = -1, high: float = 1) -> Ref:
    return g.op("Min", g.op("Max", x, g.full(low, x.dtype)), g.full(high, x.dtype))


@form("leaky_relu")
def leaky_relu(g: Graph, x: Ref, slope: float = 0.01) -> Ref:
    return g.op("LeakyRelu", x, alpha=float(slope))


@form("elu")
def elu(g: Graph, x: Ref, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Ref:
    need(input_scale == 1)
    out = g.op("Elu", x, alpha=float(alpha))
    return out if scale == 1 else g.op("Mul", out, g.full(scale, x.dtype))


@form("celu")
def celu(g: Graph, x: Ref, alpha: float = 1.0) -> Ref:
    need(x.dtype == torch.float32)
    return g.op("Celu", x, alpha=float(alpha))


@form("selu")
def selu(g: Graph, x: Ref) -> Ref:
    return g.op("Selu", x, alpha=1.6732632423543772, gamma=1.0507009873554805)


@form("prelu _prelu_kernel")
def prelu(g: Graph, x: Ref, weight: Ref) -> Ref:
    """Its weight is one number, or one for each channel."""
    if weight.ndim == 1 and weight.sizes[0] != 1 and x.ndim > 1:
        weight = g.reshape(weight, [weight.sizes[0], *[1] * (x.ndim - 2)])
    return g.op("PRelu", x, weight)


@form("hardsigmoid")
def hardsigmoid(g: Graph, x: Ref) -> Ref:
    return g.op("HardSigmoid", x, alpha=1 / 6, beta=0.5)


@form("hardswish")
def hardswish(g: Graph, x: Ref) -> Ref:
    return g.op("HardSwish", x)


@form("softplus")
def softplus(g: Graph, x: Ref, beta: float = 1, threshold: float = 20) -> Ref:
    scaled = x if beta == 1 else g.op("Mul", x, g.full(beta, x.dtype))
    out = g.op("Softplus", scaled)
    out = out if beta == 1 else g.op("Div", out, g.full(beta, x.dtype))
    return g.op("Where", g.op("Greater", scaled, g.full(threshold, x.dtype), dtype=torch.bool), x, out, dtype=x.dtype)


@form("log_sigmoid")
def log_sigmoid(g: Graph, x: Ref) -> Ref:
    return g.op("Neg", g.op("Softplus", g.op("Neg", x)))


@form("silu")
def silu(g: Graph, x: Ref) -> Ref:
    return g.op("Mul", x, g.op("Sigmoid", x))


@form("mish")
def mish(g: Graph, x: Ref) -> Ref:
    return g.op("Mul", x, g.op("Tanh", g.op("Softplus", x)))


@form("mish", since=18)
def mish_whole(g: Graph, x: Ref) -> Ref:
    return g.op("Mish", x)


@form("gelu")
def gelu(g: Graph, x: Ref, approximate: str = "none") -> Ref:
    half, one = g.full(0.5, x.dtype), g.full(1, x.dtype)
    if approximate == "tanh":
        cube = g.op("Mul", g.op("Mul", x, g.op("Mul", x, x)), g.full(0.044715, x.dtype))
        bent = g.op("Tanh", g.op("Mul", g.op("Add", x, cube), g.full(math.sqrt(2 / math.pi), x.dtype)))
    else:
        bent = g.op("Erf", g.op("Mul", x, g.full(math.sqrt(0.5), x.dtype)))
    return g.op("Mul", g.op("Mul", x, g.op("Add", bent, one)), half)


@form("gelu", since=20)
def gelu_whole(g: Graph, x: Ref, approximate: str = "none") -> Ref:
    return g.op("Gelu", x, approximate=approximate)


@form("softmax.int _softmax special_softmax")
def softmax(g: Graph, x: Ref, dim: int, *_: object, **__: object) -> Ref:
    x = g.cast(x, g.result.dtype)
    return g.op("Softmax", x, axis=axis(dim, x.ndim)) if x.ndim else g.full(1, x.dtype)


@form("_safe_softmax")
def safe_softmax(g: Graph, x: Ref, dim: int, *_: object, **__: object) -> Ref:
    """Zeros where a whole row is masked by -inf."""
    x = g.cast(x, g.result.dtype)
    top = g.reduce("ReduceMax", x, [axis(dim, x.ndim)], True)
    masked = g.op("Equal", top, g.full(-math.inf, x.dtype), dtype=torch.bool)
    return g.op("Where", masked, g.full(0, x.dtype), g.op("Softmax", x, axis=axis(dim, x.ndim)), dtype=x.dtype)


@form("log_softmax.int _log_softmax special_log_softmax")
def log_softmax(g: Graph, x: Ref, dim: int, *_: object, **__: object) -> Ref:
    x = g.cast(x, g.result.dtype)
    return g.op("LogSoftmax", x, axis=axis(dim, x.ndim)) if x.ndim else g.full(0, x.dtype)


@form("glu")
def glu(g: Graph, x: Ref, dim: int = -1) -> Ref:
    d = axis(dim, x.ndim)
    half = x.sizes[d] // 2
    a, b = g.op("Split", x, g.ints([half, half]), axis=d, outputs=2)
    return g.op("Mul", a, g.op("Sigmoid", b))
