"""Normalisations and dropout."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tessera.frontends.onnx.elements import DTYPES, FLOAT
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import number

Tensor = torch.Tensor


def _by_channel(p: Tensor, x: Tensor) -> Tensor:
    return p.reshape(-1, *[1] * (x.ndim - 2))


@operator("BatchNormalization", 14)
def batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    if training_mode:
        return _batch_statistics(x, scale, bias, mean, var, epsilon, momentum)
    if {x.dtype, scale.dtype, mean.dtype} == {x.dtype}:
        return F.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)
    y = (x - _by_channel(mean, x)) * torch.rsqrt(_by_channel(var, x) + epsilon)
    return (y * _by_channel(scale, x) + _by_channel(bias, x)).to(x.dtype)


def _batch_statistics(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, epsilon: float, momentum: float
) -> tuple[Tensor, Tensor, Tensor]:
    axes = [0, *range(2, x.ndim)]
    now_mean, now_var = x.mean(axes), x.var(axes, correction=0)
    y = (x - _by_channel(now_mean, x)) * torch.rsqrt(_by_channel(now_var, x) + epsilon)
    y = y * _by_channel(scale, x) + _by_channel(bias, x)
    running = [old * momentum + new * (1 - momentum) for old, new in ((mean, now_mean), (var, now_var))]
    return y.to(x.dtype), running[0].to(mean.dtype), running[1].to(var.dtype)


@operator("BatchNormalization", 1, 13)
def batch_normalization_of_test(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    is_test: int = 0,
    context: Context,
) -> Tensor | tuple:
    """Whoever asks for running statistics trains."""
    if context.outputs > 1:
        out = _batch_statistics(x, scale, bias, mean, var, epsilon, momentum)
        return (*out, out[1], out[2])
    if not spatial:
        return (x - mean) * torch.rsqrt(var + epsilon) * scale + bias
    return F.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)


@operator("InstanceNormalization")
def instance_normalization(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@operator("GroupNormalization", 21)
def group_normalization(
    x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5, num_groups: int, stash_type: int = FLOAT
) -> Tensor:
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@operator("GroupNormalization", 18, 20)
def group_normalization_by_group(
    x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5, num_groups: int
) -> Tensor:
    y = F.group_norm(x, num_groups, None, None, epsilon).reshape(x.shape[0], num_groups, -1)
    return (y * scale.reshape(1, -1, 1) + bias.reshape(1, -1, 1)).reshape(x.shape)


@operator("LayerNormalization", 17)
def layer_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = FLOAT,
    context: Context,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    axis = axis % x.ndim
    inner = tuple(x.shape[axis:])
    fits = tuple(scale.shape) == inner and (bias is None or tuple(bias.shape) == inner)
    if context.outputs == 1 and fits and {x.dtype, scale.dtype} == {x.dtype}:
        return F.layer_norm(x, inner, scale, bias, epsilon)
    axes = list(range(axis, x.ndim))
    wide = x.to(DTYPES[stash_type])
    mean = wide.mean(axes, keepdim=True)
    centred = wide - mean
    inverse = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + epsilon)
    y = (centred * inverse).to(x.dtype) * scale
    return (y if bias is None else y + bias).to(x.dtype), mean, inverse


@operator("RMSNormalization", 23)
def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = FLOAT
) -> Tensor:
    axis = axis % x.ndim
    if (
        tuple(scale.shape) == tuple(x.shape[axis:])
        and scale.dtype == x.dtype
        and x.dtype in (torch.float32, torch.float64)
    ):
        return F.rms_norm(x, tuple(x.shape[axis:]), scale, epsilon)
    wide = x.to(DTYPES[stash_type])
    mean = (wide * wide).mean(list(range(axis, x.ndim)), keepdim=True)
    return ((wide * torch.rsqrt(mean + epsilon)).to(x.dtype) * scale).to(x.dtype)


@operator("LpNormalization")
def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    size = x.abs().sum(axis, keepdim=True) if p == 1 else (x * x).sum(axis, keepdim=True).sqrt()
    return torch.where(size == 0, 0.0, x / size).to(x.dtype)


@operator("MeanVarianceNormalization", 9)
def mean_variance_normalization(x: Tensor, *, axes: list[int] | None = None) -> Tensor:
    dims = axes if axes is not None else [0, 2, 3]
    centred = x - x.mean(dims, keepdim=True)
    return centred / ((centred * centred).mean(dims, keepdim=True).sqrt() + 1e-9)


@operator("LRN")
def local_response_normalization(
    x: Tensor, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int
) -> Tensor:
    # No window reaches further than all channels.
    before, after = (min(n, x.shape[1] - 1) for n in ((size - 1) // 2, size - 1 - (size - 1) // 2))
    squares = F.pad((x * x).movedim(1, -1), (before, after)).unfold(-1, before + 1 + after, 1).sum(-1)
    return x / (bias + alpha / size * squares.movedim(-1, 1)).pow(beta)


@operator("Dropout", 12, random=True, sizes=(1, 2))
def dropout(
    x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None, *, seed: int | None = None, context: Context
) -> tuple[Tensor, Tensor]:
    trains = training is not None and bool(number(training))
    p = 0.5 if ratio is None else float(number(ratio))
    if not trains or p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    generator = None if seed is None else torch.Generator(context.device).manual_seed(seed)
    kept = torch.rand(x.shape, device=x.device, generator=generator) >= p
    return torch.where(kept, x / (1 - p) if p < 1 else math.nan, 0.0).to(x.dtype), kept


@operator("Dropout", 1, 11)
def dropout_of_test(x: Tensor, *, ratio: float = 0.5, is_test: int = 0, context: Context) -> tuple[Tensor, Tensor]:
    kept = torch.ones_like(x, dtype=torch.bool if context.version >= 10 else x.dtype)
    return x, kept
