"""Convolutions, embeddings and resampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.graph import Graph, Ref, same
from tessera.exporters.onnx.registry import form


def convolved(g: Graph, kind: str, x: Ref, weight: Ref, bias: Ref | None, **attributes: Any) -> Ref:
    """An image without a batch is a batch of one."""
    need(x.is_float and all(isinstance(n, int) for n in weight.sizes) and not any(same(n, 0) for n in x.sizes))
    single = x.ndim == weight.ndim - 1
    if single:
        x = g.unsqueeze(x, 0)
    out = g.op(kind, x, weight, bias, kernel_shape=list(weight.sizes[2:]), **attributes)
    return g.op("Squeeze", out, g.ints([0])) if single else out


def listed(x: object, count: int) -> list[int]:
    values = [x] if isinstance(x, int) else list(x)  # type: ignore[call-overload]
    need(all(isinstance(v, int) for v in values))
    return values * count if len(values) == 1 else values


@form("convolution _convolution")
def convolution(
    g: Graph,
    x: Ref,
    weight: Ref,
    bias: Ref | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: object,
) -> Ref:
    n = weight.ndim - 2
    pads = listed(padding, n)
    about = {"strides": listed(stride, n), "pads": pads * 2, "dilations": listed(dilation, n), "group": groups}
    if not transposed:
        return convolved(g, "Conv", x, weight, bias, **about)
    # What the output is longer by comes off its padding; what no padding is left for are zeros behind it, and the bias.
    over = [p - extra for p, extra in zip(pads, listed(output_padding, n), strict=True)]
    about["pads"] = pads + [max(p, 0) for p in over]
    if min(over) >= 0:
        return convolved(g, "ConvTranspose", x, weight, bias, **about)
    out = convolved(g, "ConvTranspose", x, weight, None, **about)
    lead = [0] * (x.ndim - n)
    out = g.op("Pad", out, g.ints([*lead, *[0] * n, *lead, *(max(-p, 0) for p in over)]), mode="constant")
    return out if bias is None else g.op("Add", out, g.reshape(bias, [*bias.sizes, *[1] * n]))


@form("conv1d conv2d conv3d")
def conv(
    g: Graph,
    x: Ref,
    weight: Ref,
    bias: Ref | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Ref:
    n = weight.ndim - 2
    dilations = listed(dilation, n)
    if padding == "valid":
        padding = (0,)
    if isinstance(padding, str):  # "same": what is odd goes to the end
        total = [d * (int(k) - 1) for d, k in zip(dilations, weight.sizes[2:], strict=True)]
        pads = [t // 2 for t in total] + [t - t // 2 for t in total]
    else:
        pads = listed(padding, n) * 2
    return convolved(
        g, "Conv", x, weight, bias, strides=listed(stride, n), pads=pads, dilations=dilations, group=groups
    )


@form("conv_transpose1d conv_transpose2d.input conv_transpose3d.input")
def conv_transpose(
    g: Graph,
    x: Ref,
    weight: Ref,
    bias: Ref | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Ref:
    return convolution(g, x, weight, bias, stride, padding, dilation, True, output_padding, groups)


@form("embedding")
def embedding(g: Graph, weight: Ref, ids: Ref, *_: object) -> Ref:
    return g.op("Gather", weight, ids, axis=0)


@form("one_hot")
def one_hot(g: Graph, ids: Ref, classes: int = -1) -> Ref:
    need(isinstance(classes, int) and classes > 0)
    if not ids.ndim:  # ONNX has no places of a single index
        return g.cast(g.op("Equal", g.tensor(torch.arange(classes)), ids, dtype=torch.bool), torch.int64)
    return g.op("OneHot", ids, g.full(classes, torch.int64), g.tensor(torch.tensor([0, 1])), axis=-1)


# --- resampling ---


def resized(g: Graph, x: Ref, scales: Sequence[float | None], mode: str, **attributes: Any) -> Ref:
    """By sizes, or by factors where PyTorch was given some: it then computes places by them."""
    if any(s is not None for s in scales):
        need(all(isinstance(s, (int, float)) for s in scales))
        target = [g.tensor(torch.tensor([1.0, 1.0, *scales])), None]  # type: ignore[list-item]
        sizes = [n for n in (*x.sizes[2:], *g.result.shape[2:])]
        if all(isinstance(n, int) for n in sizes):
            fits = [int(n * s) == m for n, s, m in zip(x.sizes[2:], scales, g.result.shape[2:], strict=True)]  # type: ignore[operator]
            need(all(fits))
    else:
        target = [None, g.ints(g.result.shape)]
    return g.op("Resize", x, None, *target, mode=mode, **attributes)


def _scales(scales: Sequence[object], rank: int) -> list:
    """The vectorised overloads give a list of factors, the others one number each."""
    given = list(scales[0]) if scales and isinstance(scales[0], (list, tuple)) else list(scales)
    return given if any(s is not None for s in given) else [None] * rank


@form("upsample_nearest1d upsample_nearest2d upsample_nearest3d")
def nearest(g: Graph, x: Ref, _: object, *scales: object) -> Ref:
    need(x.is_float)
    about = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return resized(g, x, _scales(scales, x.ndim - 2), "nearest", **about)


@form("_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d")
def nearest_exact(g: Graph, x: Ref, _: object, *scales: object) -> Ref:
    need(x.is_float)
    about = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    return resized(g, x, _scales(scales, x.ndim - 2), "nearest", **about)


def _between(g: Graph, x: Ref, corners: bool, scales: tuple, mode: str, **about: object) -> Ref:
    need(x.is_float)
    places = "align_corners" if corners else "half_pixel"
    factors = [None] * (x.ndim - 2) if corners else _scales(scales, x.ndim - 2)
    return resized(g, x, factors, mode, coordinate_transformation_mode=places, **about)


@form("upsample_linear1d upsample_bilinear2d upsample_trilinear3d")
def linear_resize(g: Graph, x: Ref, _: object, corners: bool, *scales: object) -> Ref:
    return _between(g, x, corners, scales, "linear")


@form("upsample_bicubic2d")
def cubic_resize(g: Graph, x: Ref, _: object, corners: bool, *scales: object) -> Ref:
    return _between(g, x, corners, scales, "cubic", cubic_coeff_a=-0.75)


@form("_upsample_bilinear2d_aa", since=18)
def smooth_linear_resize(g: Graph, x: Ref, _: object, corners: bool, *scales: object) -> Ref:
    need(not corners)  # runtimes weigh otherwise
    return _between(g, x, corners, scales, "linear", antialias=1, exclude_outside=1)


@form("_upsample_bicubic2d_aa", since=18)
def smooth_cubic_resize(g: Graph, x: Ref, _: object, corners: bool, *scales: object) -> Ref:
    need(not corners)  # runtimes weigh otherwise
    return _between(g, x, corners, scales, "cubic", cubic_coeff_a=-0.5, antialias=1, exclude_outside=1)


_BEFORE_20 = {0: "bilinear", 1: "nearest", 2: "bicubic"}
_SINCE_20 = {0: "linear", 1: "nearest", 2: "cubic"}


@form("grid_sampler grid_sampler_2d grid_sampler_3d")
def grid_sample(g: Graph, x: Ref, grid: Ref, mode: int, padding: int, corners: bool) -> Ref:
    need(x.ndim == 4 or g.opset >= 20)
    names = _SINCE_20 if g.opset >= 20 else _BEFORE_20
    border = ("zeros", "border", "reflection")[padding]
    return g.op("GridSample", x, grid, mode=names[mode], padding_mode=border, align_corners=int(corners))
