"""Activation functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tessera.frontends.onnx.operators.products import sums_in_half
from tessera.frontends.onnx.registry import MICROSOFT, operator

Tensor = torch.Tensor


@operator("Relu")
def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


@operator("Sigmoid")
def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


@operator("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@operator("PRelu", 7)
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


@operator("PRelu", 1, 6)
def prelu_of_channels(x: Tensor, slope: Tensor) -> Tensor:
    if slope.ndim == 1 and x.ndim > 1:
        slope = slope.reshape(-1, *[1] * (x.ndim - 2))
    return torch.where(x < 0, x * slope, x)


@operator("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


@operator("Celu", 12)
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.celu(x, alpha)


@operator("Selu")
def selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


@operator("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return torch.clamp(alpha * x + beta, 0, 1)


@operator("HardSwish", 14)
def hard_swish(x: Tensor) -> Tensor:
    return F.hardswish(x)


@operator("ThresholdedRelu")
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, 0)


@operator("Shrink", 9)
def shrink(x: Tensor, *, lambd: float = 0.5, bias: float = 0.0) -> Tensor:
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0)).to(x.dtype)


@operator("Softplus")
def softplus(x: Tensor) -> Tensor:
    return F.softplus(x)


@operator("Softsign")
def softsign(x: Tensor) -> Tensor:
    return F.softsign(x)


@operator("Mish", 18)
def mish(x: Tensor) -> Tensor:
    return F.mish(x)


@operator("Gelu", 20)
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@operator("Gelu", domain=MICROSOFT)
def gelu_of_microsoft(x: Tensor) -> Tensor:
    return F.gelu(x)


@operator("Swish", 24)
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@operator("Affine", 1, 6)
def affine(x: Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    return alpha * x + beta


@operator("ScaledTanh", 1, 6)
def scaled_tanh(x: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    return alpha * torch.tanh(beta * x)


@operator("ParametricSoftplus", 1, 6)
def parametric_softplus(x: Tensor, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    return alpha * F.softplus(beta * x)


def _flat(x: Tensor, axis: int) -> Tensor:
    """Before opset 13 all dimensions from `axis` on counted as one."""
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(x.shape[:axis].numel() if axis else 1, -1)


@operator("Softmax", 13)
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    if sums_in_half(x):  # each step rounded, as the standard writes the operator
        parts = torch.exp(x - x.amax(axis, keepdim=True))
        return parts / parts.sum(axis, keepdim=True)
    return torch.softmax(x, axis)


@operator("Softmax", 1, 12)
def softmax_of_rows(x: Tensor, *, axis: int = 1) -> Tensor:
    if axis in (-1, x.ndim - 1):
        return torch.softmax(x, -1)
    return torch.softmax(_flat(x, axis), 1).reshape(x.shape)


@operator("LogSoftmax", 13)
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, axis)


@operator("LogSoftmax", 1, 12)
def log_softmax_of_rows(x: Tensor, *, axis: int = 1) -> Tensor:
    return torch.log_softmax(_flat(x, axis), 1).reshape(x.shape)


def _one_largest(x: Tensor, axis: int) -> Tensor:
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1.0)


@operator("Hardmax", 13)
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return _one_largest(x, axis)


@operator("Hardmax", 1, 12)
def hardmax_of_rows(x: Tensor, *, axis: int = 1) -> Tensor:
    return _one_largest(_flat(x, axis), 1).reshape(x.shape)
