"""com.microsoft: ONNX's own operators under another roof.

Some were there before ONNX took them over; others take images whose channels stand last.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.convolution import conv_transpose, qlinear_conv
from tessera.frontends.onnx.operators.creation import range_
from tessera.frontends.onnx.operators.image import grid_sample
from tessera.frontends.onnx.operators.indexing import COUNTED, gather_nd, unique
from tessera.frontends.onnx.operators.microsoft_fused import fused_conv
from tessera.frontends.onnx.operators.padding import pad_by_input
from tessera.frontends.onnx.operators.pooling import max_pool
from tessera.frontends.onnx.operators.products import matmul_integer, multiplied
from tessera.frontends.onnx.operators.shapes import trilu
from tessera.frontends.onnx.registry import MICROSOFT, operator
from tessera.frontends.onnx.values import number, numbers

Tensor = torch.Tensor

operator("Trilu", domain=MICROSOFT, moves=True, sizes=(1,))(trilu)
operator("GatherND", domain=MICROSOFT, moves=True)(gather_nd)
operator("Pad", domain=MICROSOFT, moves=True, sizes=(1, 2, 3))(pad_by_input)
operator("GridSample", domain=MICROSOFT)(grid_sample)
operator("MatMulInteger16", domain=MICROSOFT)(matmul_integer)


@operator("Range", domain=MICROSOFT, sizes=(0, 1, 2))
def range_by_ones(start: Tensor, limit: Tensor, delta: Tensor | None = None, *, context: Context) -> Tensor:
    return range_(start, limit, torch.ones_like(start) if delta is None else delta, context=context)


@operator("ExpandDims", domain=MICROSOFT, moves=True, sizes=(1,))
def expand_dims(x: Tensor, axis: Tensor) -> Tensor:
    return x.unsqueeze(int(number(axis)))


@operator("Unique", domain=MICROSOFT, interpreted=COUNTED)
def unique_in_order(x: Tensor) -> tuple:
    values, _, inverse, counts = unique(x, sorted=0)
    return values, inverse, counts


@operator("CDist", domain=MICROSOFT)
def cdist(a: Tensor, b: Tensor, *, metric: str = "sqeuclidean") -> Tensor:
    squares = (a.unsqueeze(1) - b.unsqueeze(0)).square().sum(-1)
    if metric not in ("euclidean", "sqeuclidean"):
        raise OnnxError(f"metric: expected euclidean or sqeuclidean, got {metric!r}")
    return squares.sqrt() if metric == "euclidean" else squares


@operator("UnfoldTensor", domain=MICROSOFT)
def unfold_tensor(x: Tensor, *, dim: int = -1, size: int, step: int = 1) -> Tensor:
    return x.unfold(dim, size, step)


@operator("NGramRepeatBlock", domain=MICROSOFT)
def ngram_repeat_block(ids: Tensor, scores: Tensor, *, ngram_size: int) -> Tensor:
    """Scores of the next token; one that would repeat a run of `ngram_size` tokens cannot be chosen."""
    if ids.shape[1] < ngram_size:
        return scores
    runs = ids.unfold(1, ngram_size, 1)
    last = ids[:, ids.shape[1] - ngram_size + 1 :].unsqueeze(1)
    repeats = (runs[..., :-1] == last).all(-1)
    barred = torch.where(repeats, float("-inf"), 0.0).to(scores.dtype)
    return scores.scatter_add(1, runs[..., -1].to(torch.int64), barred)


@operator("ConvTransposeWithDynamicPads", domain=MICROSOFT, sizes=(2,))
def conv_transpose_with_dynamic_pads(
    x: Tensor,
    w: Tensor,
    pads: Tensor | None = None,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    given = None if pads is None else [int(n) for n in numbers(pads)]
    return conv_transpose(
        x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, output_padding=output_padding, pads=given,
        strides=strides,
    )  # fmt: skip


def _channels_last(fn: Callable[..., Tensor], x: Tensor, *rest: object, **attributes: object) -> Tensor:
    return fn(x.movedim(-1, 1), *rest, **attributes).movedim(1, -1)


@operator("NhwcFusedConv", domain=MICROSOFT)
def nhwc_fused_conv(
    x: Tensor, w: Tensor, b: Tensor | None = None, z: Tensor | None = None, *,
    activation: str = "", activation_params: list[float] | None = None, auto_pad: str = "NOTSET",
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Tensor:  # fmt: skip
    return _channels_last(
        fused_conv, x, w, b, None if z is None else z.movedim(-1, 1), activation=activation,
        activation_params=activation_params, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads,
        strides=strides,
    )  # fmt: skip


@operator("NhwcConv", domain=MICROSOFT)
def nhwc_conv(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, auto_pad: str = "NOTSET", dilations: list[int] | None = None,
    group: int = 1, kernel_shape: list[int] | None = None, pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:  # fmt: skip
    return nhwc_fused_conv(x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides)


@operator("NhwcMaxPool", domain=MICROSOFT)
def nhwc_max_pool(
    x: Tensor, *, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: list[int] | None = None,
    kernel_shape: list[int], pads: list[int] | None = None, strides: list[int] | None = None, context: Context,
) -> Tensor:  # fmt: skip
    return _channels_last(
        max_pool, x, auto_pad=auto_pad, ceil_mode=ceil_mode, dilations=dilations, kernel_shape=kernel_shape, pads=pads,
        strides=strides, context=context,
    )  # fmt: skip


@operator("QLinearConv", domain=MICROSOFT)
def qlinear_conv_of_either_layout(
    x: Tensor, x_scale: Tensor, x_zero: Tensor, w: Tensor, w_scale: Tensor, w_zero: Tensor, y_scale: Tensor,
    y_zero: Tensor, b: Tensor | None = None, *, auto_pad: str = "NOTSET", channels_last: int = 0,
    dilations: list[int] | None = None, group: int = 1, kernel_shape: list[int] | None = None,
    pads: list[int] | None = None, strides: list[int] | None = None,
) -> Tensor:  # fmt: skip
    y = qlinear_conv(
        x.movedim(-1, 1) if channels_last else x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b,
        auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides,
    )  # fmt: skip
    return y.movedim(1, -1) if channels_last else y


def _group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, activation: int, channels_last: int, epsilon: float, groups: int
) -> Tensor:
    y = F.group_norm((x.movedim(-1, 1) if channels_last else x).float(), groups, gamma.float(), beta.float(), epsilon)
    y = (F.silu(y) if activation else y).to(x.dtype)
    return y.movedim(1, -1) if channels_last else y


@operator("GroupNorm", domain=MICROSOFT)
def group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, *, activation: int, channels_last: int = 1, epsilon: float = 1e-5,
    groups: int,
) -> Tensor:  # fmt: skip
    return _group_norm(x, gamma, beta, activation, channels_last, epsilon, groups)


@operator("SkipGroupNorm", domain=MICROSOFT)
def skip_group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, skip: Tensor, bias: Tensor | None = None, *, activation: int,
    channels_last: int = 1, epsilon: float = 1e-5, groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    channel = -1 if channels_last else 1

    def by_element(t: Tensor) -> Tensor:
        """One number for each channel, for each example too or not, beside all pixels."""
        if t.ndim == x.ndim:
            return t
        sizes = [1] * x.ndim
        sizes[channel] = -1
        if t.ndim == 2:
            sizes[0] = t.shape[0]
        return t.reshape(sizes)

    total = x + by_element(skip) if bias is None else x + by_element(skip) + by_element(bias)
    return _group_norm(total, gamma, beta, activation, channels_last, epsilon, groups), total


@operator("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(x: Tensor, bias: Tensor) -> Tensor:
    left, right = (x + bias).chunk(2, -1)
    return left * F.gelu(right)


@operator("GemmFastGelu", domain=MICROSOFT)
def gemm_fast_gelu(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    y = multiplied(x, w)
    return F.gelu(y if bias is None else y + bias, approximate="tanh")
