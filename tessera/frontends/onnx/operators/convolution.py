"""Convolutions of any number of dimensions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.allocation import allowed
from tessera.frontends.onnx.operators.products import shifted, sums_in_half
from tessera.frontends.onnx.operators.rounding import requantized
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.symbols import without_guards
from tessera.frontends.onnx.values import numbers
from tessera.ir.types import size_hint

Tensor = torch.Tensor
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
MOST_PLACES, PLACES_EACH = 2**28, 1024  # that a few bytes may ask for; for each place of an image, where that is more
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def paddings(
    sizes: list, kernel: list, strides: list, dilations: list, pads: list | None, auto_pad: str
) -> tuple[list, list]:
    """Padding before and after each dimension."""
    rank = len(kernel)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        before, after = [], []
        for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
            total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            small, large = total // 2, total - total // 2
            before.append(small if auto_pad == "SAME_UPPER" else large)
            after.append(large if auto_pad == "SAME_UPPER" else small)
        return before, after
    if auto_pad not in ("NOTSET", "VALID", ""):
        raise OnnxError(f"auto_pad: expected NOTSET, VALID, SAME_UPPER or SAME_LOWER, got {auto_pad!r}")
    if auto_pad == "VALID" or not pads:
        return [0] * rank, [0] * rank
    if len(pads) != 2 * rank:
        raise OnnxError(f"pads: expected {2 * rank} numbers, got {len(pads)}")
    before, after = list(pads[:rank]), list(pads[rank:])
    justified(f"pads of {pads}", [size_hint(n) + p + q for n, p, q in zip(sizes, before, after, strict=True)], sizes)
    return before, after


def fits(n: int, kernel: int, dilation: int) -> None:
    """Refuse what reaches past the padded image, before PyTorch's arithmetic overflows."""
    if size_hint(n - dilation * (kernel - 1)) < 0:
        raise OnnxError(f"{kernel} elements, {dilation} apart, do not fit into {n}")


def justified(what: str, counts: list[int], sizes: list) -> None:
    """Refuse attributes that make much of a small image: places after padding, or windows and their elements."""
    most = max(MOST_PLACES, PLACES_EACH * math.prod(map(size_hint, sizes)))
    if math.prod(max(n, 1) for n in counts) > most:
        raise OnnxError(f"{what} over an image of {list(sizes)} take more than {most} steps")


def padded(x: Tensor, before: list, after: list, value: float = 0.0) -> Tensor:
    amounts = [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    return F.pad(x, amounts, value=value)


def convolve(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    auto_pad: str,
    dilations: list[int] | None,
    group: int,
    pads: list[int] | None,
    strides: list[int] | None,
) -> Tensor:
    if sums_in_half(x):
        wide = convolve(x.float(), w.float(), b if b is None else b.float(), auto_pad, dilations, group, pads, strides)
        return wide.half()
    rank = x.ndim - 2
    kernel, ones = list(w.shape[2:]), [1] * rank
    dilations, strides = dilations or ones, strides or ones
    before, after = paddings(list(x.shape[2:]), kernel, strides, dilations, pads, auto_pad)
    if before != after or any(n < 0 for n in before):
        x, before = padded(x, before, after), [0] * rank
    for n, k, p, d in zip(x.shape[2:], kernel, before, dilations, strict=True):
        fits(n + 2 * p, k, d)
    if rank not in _CONV:
        raise OnnxError(f"Conv: expected 1 to 3 dimensions in space, got {rank}")
    with without_guards(x):  # PyTorch chooses a library by the size of the batch
        return _CONV[rank](x, w, b, strides, before, dilations, group)


@operator("Conv")
def conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    return convolve(x, w, b, auto_pad, dilations, group, pads, strides)


def _whole(
    x: Tensor, x_zero: Tensor | None, w: Tensor, w_zero: Tensor | None, bias: Tensor | None, **how: object
) -> Tensor:
    """A convolution of whole numbers: exact in float64, which PyTorch's kernels take."""
    product = convolve(shifted(x, x_zero, 1).double(), shifted(w, w_zero, 0).double(), None, **how).to(torch.int32)  # type: ignore[arg-type]
    return product if bias is None else product + bias.reshape(-1, *[1] * (x.ndim - 2))


@operator("ConvInteger", 10)
def conv_integer(
    x: Tensor,
    w: Tensor,
    x_zero: Tensor | None = None,
    w_zero: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    return _whole(
        x, x_zero, w, w_zero, None, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides
    )


@operator("QLinearConv", 10)
def qlinear_conv(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    product = _whole(
        x, x_zero, w, w_zero, b, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides
    )
    scale = x_scale * w_scale / y_scale
    if scale.ndim == 1 and scale.shape[0] > 1:
        scale = scale.reshape(-1, *[1] * (x.ndim - 2))
    return requantized(product.to(x_scale.dtype) * scale, y_zero)


@operator("ConvTranspose")
def conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None,
    output_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    rank = x.ndim - 2
    ones, zeros = [1] * rank, [0] * rank
    strides, dilations, extra = strides or ones, dilations or ones, output_padding or zeros
    sizes, kernel = list(x.shape[2:]), list(w.shape[2:])
    full = [
        (n - 1) * s + (k - 1) * d + 1 + e
        for n, s, k, d, e in zip(sizes, strides, kernel, dilations, extra, strict=True)
    ]
    wanted = list(output_shape[-rank:]) if output_shape else None
    if wanted is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(sizes, strides, strict=True)]
    if wanted is not None:
        totals = [f - o for f, o in zip(full, wanted, strict=True)]
        halves = [t // 2 for t in totals]
        rest = [t - h for t, h in zip(totals, halves, strict=True)]
        before, after = (halves, rest) if auto_pad == "SAME_UPPER" else (rest, halves)
    else:
        before, after = paddings(sizes, kernel, strides, dilations, pads, auto_pad)
    if (
        before == after
        and all(n >= 0 for n in before)
        and all(e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True))
    ):
        with without_guards(x):
            return _TRANSPOSED[rank](x, w, b, strides, before, extra, group, dilations)
    with without_guards(x):
        whole = _TRANSPOSED[rank](x, w, b, strides, zeros, zeros, group, dilations)
    return padded(whole, [-n for n in before], [e - n for e, n in zip(extra, after, strict=True)])


@operator("CausalConvWithState", 27)
def causal_conv(
    x: Tensor, w: Tensor, b: Tensor | None = None, past: Tensor | None = None, *, activation: str = "none"
) -> tuple[Tensor, Tensor]:
    held = w.shape[2] - 1
    before = x.new_zeros(x.shape[0], x.shape[1], held) if past is None else past
    whole = torch.cat([before, x], 2)
    y = convolve(whole, w, b, "NOTSET", None, x.shape[1], None, None)
    present = whole.narrow(2, whole.shape[2] - held, held)
    return (F.silu(y) if activation in ("silu", "swish") else y), present


@operator("Col2Im", 18, sizes=(1, 2))
def col2im(
    x: Tensor,
    image_shape: Tensor,
    block_shape: Tensor,
    *,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
    context: Context,
) -> Tensor:
    """Sums of columns at the places that they came from."""
    image, block = numbers(image_shape), numbers(block_shape)
    rank = len(image)
    ones = [1] * rank
    dilations, strides = dilations or ones, strides or ones
    before, after = paddings(image, block, strides, dilations, pads, "NOTSET")
    room = [n + p + q for n, p, q in zip(image, before, after, strict=True)]
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(room, dilations, block, strides, strict=True)]
    channels = x.shape[1] // math.prod(block)
    allowed([*block, *counts], 8, context)
    allowed([x.shape[0], channels, *room], x.element_size(), context)
    flat = torch.zeros([1] * (2 * rank), dtype=torch.int64, device=x.device)
    for i in range(rank):  # the place in the padded image of each element of each block, one dimension at a time
        offsets = torch.arange(block[i], device=x.device) * dilations[i]
        starts = torch.arange(counts[i], device=x.device) * strides[i]
        shape_k, shape_c = [1] * (2 * rank), [1] * (2 * rank)
        shape_k[i], shape_c[rank + i] = block[i], counts[i]
        flat = flat * room[i] + offsets.reshape(shape_k) + starts.reshape(shape_c)
    columns = x.reshape(x.shape[0], channels, -1)
    out = x.new_zeros(x.shape[0], channels, math.prod(room))
    out = out.scatter_add(2, flat.reshape(1, 1, -1).expand(columns.shape), columns)
    return padded(out.reshape(x.shape[0], channels, *room), [-n for n in before], [-n for n in after])


@operator("DeformConv", 19)
def deform_conv(
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    b: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    offset_group: int = 1,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """A convolution of an image sampled at places that another input shifts."""
    n, c, h, wide = x.shape
    kh, kw = w.shape[2:]
    (dh, dw), (sh, sw), (ph, pw) = dilations or [1, 1], strides or [1, 1], (pads or [0, 0])[:2]
    oh, ow = offset.shape[2:]
    shift = offset.reshape(n, offset_group, kh * kw, 2, oh, ow)
    rows = torch.arange(oh, device=x.device).reshape(1, oh, 1) * sh - ph
    columns = torch.arange(ow, device=x.device).reshape(1, 1, ow) * sw - pw
    taps_y = torch.arange(kh, device=x.device).repeat_interleave(kw).reshape(-1, 1, 1) * dh
    taps_x = torch.arange(kw, device=x.device).repeat(kh).reshape(-1, 1, 1) * dw
    ys = shift[:, :, :, 0] + (rows + taps_y)
    xs = shift[:, :, :, 1] + (columns + taps_x)
    images = x.reshape(n * offset_group, c // offset_group, h * wide)
    flat = ys.reshape(n * offset_group, 1, -1), xs.reshape(n * offset_group, 1, -1)
    sampled = _sampled(images, *flat, h, wide).reshape(n, offset_group, c // offset_group, kh * kw, oh, ow)
    if mask is not None:
        sampled = sampled * mask.reshape(n, offset_group, 1, kh * kw, oh, ow)
    columns_of = sampled.reshape(n, group, c // group * kh * kw, oh * ow)
    weights = w.reshape(group, w.shape[0] // group, -1)
    y = torch.matmul(weights, columns_of).reshape(n, w.shape[0], oh, ow)
    return y if b is None else y + b.reshape(1, -1, 1, 1)


def _sampled(images: Tensor, ys: Tensor, xs: Tensor, h: int, w: int) -> Tensor:
    """Elements between those of images, [count, channels, h * w], with zeros around them."""
    y0, x0 = ys.floor(), xs.floor()
    total = None
    for y, wy in ((y0, y0 + 1 - ys), (y0 + 1, ys - y0)):
        for x, wx in ((x0, x0 + 1 - xs), (x0 + 1, xs - x0)):
            inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
            place = y.clamp(0, h - 1).to(torch.int64) * w + x.clamp(0, w - 1).to(torch.int64)
            part = images.gather(2, place.expand(-1, images.shape[1], -1)) * (wy * wx * inside)
            total = part if total is None else total + part
    return total  # type: ignore[return-value]
