"""com.microsoft: operators that ONNX Runtime's optimizer fuses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.convolution import convolve
from tessera.frontends.onnx.operators.norms import rms_normalization
from tessera.frontends.onnx.operators.products import gemm, multiplied
from tessera.frontends.onnx.registry import MICROSOFT, operator

Tensor = torch.Tensor


def _activated(x: Tensor, name: str, params: list[float]) -> Tensor:
    match name:
        case "" | "Identity":
            return x
        case "Relu":
            return torch.relu(x)
        case "Tanh":
            return torch.tanh(x)
        case "Sigmoid":
            return torch.sigmoid(x)
        case "LeakyRelu":
            return F.leaky_relu(x, params[0] if params else 0.01)
        case "Clip":
            return torch.clamp(x, *params)
        case "HardSigmoid":
            return torch.clamp(params[0] * x + params[1], 0, 1)
        case "HardSwish":
            return F.hardswish(x)
    raise OnnxError(f"activation: unknown {name!r}")


@operator("FusedMatMul", domain=MICROSOFT)
@operator("TransposeMatMul", domain=MICROSOFT)
def fused_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    def turned(x: Tensor, matrix: int, batch: int) -> Tensor:
        if batch:
            x = x.movedim(0, -2)
        return x.transpose(-2, -1) if matrix and x.ndim > 1 else x

    product = multiplied(turned(a, transA, transBatchA), turned(b, transB, transBatchB))
    return product if alpha == 1.0 else product * alpha


@operator("FusedGemm", domain=MICROSOFT)
def fused_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    activation: str = "",
    activation_alpha: float = 0.0,
    activation_beta: float = 0.0,
    activation_gamma: float = 0.0,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    y = gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return _activated(y, activation, [activation_alpha, activation_beta])


@operator("FusedConv", domain=MICROSOFT)
def fused_conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    z: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: list[float] | None = None,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    y = convolve(x, w, b, auto_pad, dilations, group, pads, strides)
    return _activated(y if z is None else y + z, activation, activation_params or [])


@operator("BiasGelu", domain=MICROSOFT)
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@operator("FastGelu", domain=MICROSOFT)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("QuickGelu", domain=MICROSOFT)
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _summed(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    return x + skip if bias is None else x + skip + bias


@operator("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    context: Context,
) -> tuple:
    total = _summed(x, skip, bias)
    y = F.layer_norm(total, (total.shape[-1],), gamma, beta, epsilon)
    return y, *_statistics(total, epsilon, context), total


def _statistics(x: Tensor, epsilon: float, context: Context) -> tuple[Tensor | None, Tensor | None]:
    if not context.wants(1) and not context.wants(2):
        return None, None
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    return mean, torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + epsilon)


@operator("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12
) -> tuple:
    total = _summed(x, skip, bias)
    inverse = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + epsilon)
    return rms_normalization(total, gamma, epsilon=epsilon), None, inverse, total


@operator("SimplifiedLayerNormalization")  # ONNX Runtime puts it into ONNX's own domain
def simplified_layer_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple:
    inverse = torch.rsqrt(x.float().square().mean(list(range(axis % x.ndim, x.ndim)), keepdim=True) + epsilon)
    return rms_normalization(x, scale, axis=axis, epsilon=epsilon, stash_type=stash_type), inverse


@operator("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    positions: Tensor,
    segment_table: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
) -> tuple:
    total = F.embedding(ids.to(torch.int64), words)
    if position_ids is None:
        total = total + positions[: ids.shape[1]]
    else:
        total = total + F.embedding(position_ids.to(torch.int64), positions)
    if segments is not None and segment_table is not None:
        total = total + F.embedding(segments.to(torch.int64), segment_table)
    y = F.layer_norm(total, (total.shape[-1],), gamma, beta, epsilon)
    if mask is None:
        counts = torch.zeros(ids.shape[0], dtype=torch.int32, device=ids.device)
    else:
        counts = mask.to(torch.int32).sum(1, dtype=torch.int32)
    return y, counts, total


@operator("BiasAdd", domain=MICROSOFT)
def bias_add(x: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
    return x + bias + skip


@operator("Inverse", domain=MICROSOFT)
def inverse(x: Tensor) -> Tensor:
    return torch.linalg.inv(x)
