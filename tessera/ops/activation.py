"""Activations: pointwise operators that PyTorch differentiates with one fused kernel each.

Their derivatives are those kernels (`aten.silu_backward`, …), so a backward trace stays short and gives
eager's own bits. The kernels are operators like any other: those whose derivative is simple are declared
below, for second derivatives; the others go through PyTorch's formula.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.ir.builder import aten
from tessera.ir.equation import Value
from tessera.ops.families import pointwise, unary
from tessera.ops.op import declare

unary("aten.relu", by=lambda t, x, y: aten.threshold_backward(t, y, 0))
unary("aten.sigmoid", by=lambda t, x, y: aten.sigmoid_backward(t, y))
unary("aten.tanh", by=lambda t, x, y: aten.tanh_backward(t, y))
unary("aten.silu", by=lambda t, x, y: aten.silu_backward(t, x), cost=11)
unary("aten.mish", by=lambda t, x, y: aten.mish_backward(t, x), cost=24)
unary("aten.gelu", by=lambda t, x, y, approximate="none": aten.gelu_backward(t, x, approximate=approximate), cost=15)
unary("aten.softplus", by=lambda t, x, y, beta, limit: aten.softplus_backward(t, x, beta, limit), cost=16)
unary("aten.elu", by=lambda t, x, y, alpha, scale, slope: aten.elu_backward(t, alpha, scale, slope, False, x), cost=10)
unary("aten.celu", by=lambda t, x, y, alpha: aten.elu_backward(t, alpha, 1, 1.0 / alpha, False, x), cost=10)
unary("aten.leaky_relu", by=lambda t, x, y, slope: aten.leaky_relu_backward(t, x, slope, False), cost=2)
unary("aten.hardtanh", by=lambda t, x, y, low, high: aten.hardtanh_backward(t, x, low, high), cost=2)
unary("aten.hardswish", by=lambda t, x, y: aten.hardswish_backward(t, x), cost=5)
unary("aten.hardsigmoid", by=lambda t, x, y: aten.hardsigmoid_backward(t, x), cost=4)
unary("aten.hardshrink", by=lambda t, x, y, width: aten.hardshrink_backward(t, x, width), cost=2)
unary("aten.softshrink", by=lambda t, x, y, width: aten.softshrink_backward(t, x, width), cost=2)
unary("aten.threshold", by=lambda t, x, y, limit, value: aten.threshold_backward(t, x, limit))
unary("aten.logit", by=lambda t, x, y, eps: aten.logit_backward(t, x, eps), cost=10)


def _glu_jvp(ts: Sequence[Value], y: Value, x: Value, dim: int) -> Value:
    """PyTorch's tangent of it is a kernel that has no derivative."""
    half = x.shape[dim] // 2
    a, ta = (aten.slice(t, dim, 0, half) for t in (x, ts[0]))
    b, tb = (aten.slice(t, dim, half, x.shape[dim]) for t in (x, ts[0]))
    gate = aten.sigmoid(b)
    return ta * gate + a * aten.sigmoid_backward(tb, gate)


declare("aten.glu.default", "activation", jvp=_glu_jvp)

# --- the kernels above, by their gradient and by the point they were taken at ----------------------

pointwise(
    "aten.sigmoid_backward",
    [lambda t, z, g, y: aten.sigmoid_backward(t, y), lambda t, z, g, y: t * g * (y * -2 + 1)],
    cost=3,
)
pointwise(
    "aten.tanh_backward", [lambda t, z, g, y: aten.tanh_backward(t, y), lambda t, z, g, y: t * g * (y * -2)], cost=3
)
pointwise(
    "aten.threshold_backward",
    [lambda t, z, g, x, limit: aten.threshold_backward(t, x, limit), lambda t, z, g, x, limit: aten.zeros_like(t)],
)
pointwise(
    "aten.leaky_relu_backward",
    [
        lambda t, z, g, x, slope, by_result: aten.leaky_relu_backward(t, x, slope, by_result),
        lambda t, z, g, x, slope, by_result: aten.zeros_like(t),
    ],
    cost=2,
)
pointwise(
    "aten.hardtanh_backward",
    [
        lambda t, z, g, x, low, high: aten.hardtanh_backward(t, x, low, high),
        lambda t, z, g, x, low, high: aten.zeros_like(t),
    ],
    cost=2,
)
for _name, _cost in (
    ("silu", 12), ("mish", 24), ("gelu", 24), ("softplus", 16), ("elu", 10), ("hardswish", 5),
    ("hardsigmoid", 3), ("hardshrink", 2), ("softshrink", 2), ("logit", 6),
):  # fmt: skip
    pointwise(f"aten.{_name}_backward", cost=_cost)
