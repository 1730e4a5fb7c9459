"""Quantized numbers: to them, from them, and products of them."""

from __future__ import annotations

import torch

from tessera.frontends.onnx import elements
from tessera.frontends.onnx.elements import DTYPES, FLOAT8, FLOAT8_DTYPES, Narrow, code_of
from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.operators.casts import cast_to
from tessera.frontends.onnx.operators.products import matmul_integer
from tessera.frontends.onnx.operators.rounding import bounds, quotient, requantized
from tessera.frontends.onnx.registry import operator

Tensor = torch.Tensor


def _data(x: object) -> Tensor:
    data = x.data if isinstance(x, Narrow) else x
    assert isinstance(data, Tensor)
    return data


def by_element(p: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """A scale or zero point for each element: one for all, one an index of `axis`, or one a block along it."""
    if p.ndim == 0 or (p.ndim == 1 and p.shape[0] == 1 and not block):
        return p.reshape(())
    if p.ndim == 1 and not (block and x.ndim == 1):
        sizes = [1] * x.ndim
        sizes[axis] = -1
        return p.reshape(sizes)
    axis = axis % x.ndim
    step = block or -(-x.shape[axis] // p.shape[axis])
    return p.repeat_interleave(step, axis).narrow(axis, 0, x.shape[axis])


@operator("QuantizeLinear", 10)
def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero: object = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> object:
    code = code_of(zero) if zero is not None else output_dtype or elements.UINT8
    each = scale if x.ndim == 0 else by_element(scale, x, axis, block_size)
    wide = DTYPES[precision] if precision else torch.float32 if each.dtype in FLOAT8_DTYPES else each.dtype
    ratio = quotient((x.float() if not x.is_floating_point() else x).to(wide), each.to(wide))
    if code in FLOAT8 or elements.is_small_float(code):
        moved = ratio if zero is None else ratio + by_element(_data(zero), x, axis, block_size).to(wide)
        return cast_to(moved, code, saturate)
    low, high = bounds(elements.carrier(code), code)
    rounded = torch.round(ratio).float()
    if zero is not None:
        rounded = rounded + by_element(_data(zero).to(torch.int32), x, axis, block_size).to(torch.float32)
    limited = torch.clamp(rounded, low, high).to(torch.int32)
    return elements.wrap(limited.to(elements.carrier(code)), code)


@operator("DequantizeLinear", 10)
def dequantize_linear(
    x: object, scale: Tensor, zero: object = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Tensor:
    data = _data(x)
    target = DTYPES[output_dtype] if output_dtype else scale.dtype
    wide = torch.float32 if scale.dtype in FLOAT8_DTYPES else scale.dtype
    whole = data.dtype not in FLOAT8_DTYPES and not data.is_floating_point()
    moved = data.to(torch.int32) if whole else data.to(wide)
    if zero is not None:
        shift = by_element(_data(zero).to(moved.dtype), data, axis, block_size)
        moved = moved - shift
    return (moved.to(wide) * by_element(scale.to(wide), data, axis, block_size)).to(target)


@operator("DynamicQuantizeLinear", 11)
def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = torch.clamp(x.amin(), max=0.0), torch.clamp(x.amax(), min=0.0)
    scale = (high - low) / 255.0
    zero = torch.round(torch.clamp(quotient(-low, scale), 0, 255)).to(torch.uint8)
    return requantized(quotient(x, scale), zero), scale, zero


@operator("QLinearMatMul", 10)
def qlinear_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    if a_scale.ndim > 1 or b_scale.ndim > 1:
        raise OnnxError("QLinearMatMul: expected scales of at most one dimension")
    product = matmul_integer(a, b, a_zero, b_zero)
    rows = a_scale.reshape(-1, 1) if a_scale.ndim else a_scale
    scale = rows.float() * b_scale.float() / y_scale.float()
    return requantized(product.float() * (scale if scale.numel() > 1 else scale.reshape(())), y_zero)
