"""Fake quantisation, as training for numbers of few bits has it, in plainer operators of PyTorch's, bit for bit.

For targets without an operator of that name. QuantizeLinear of ONNX is none: it divides by the scale, where PyTorch
multiplies by its reciprocal, and the two differ at ties.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tessera.torch_internals.operators import OpOverload

Tensor = torch.Tensor


def per_tensor(x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int) -> list[Tensor]:
    """`scale` counts in single precision."""
    each = np.float32(scale)
    return _parts(x, float(each), float(1 / each), zero_point, quant_min, quant_max)


def per_tensor_by(
    x: Tensor, scale: Tensor, zero_point: Tensor, fake_quant_enabled: Tensor, quant_min: int, quant_max: int
) -> list[Tensor]:
    """Scale and zero are tensors of one element, and so is whether anything is done at all."""
    out, kept = _parts(x, scale, scale.reciprocal(), zero_point, quant_min, quant_max)
    done = fake_quant_enabled != 0
    return [torch.where(done, out, x), kept | ~done]


def per_channel(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> list[Tensor]:
    along = [-1 if d == axis % x.ndim else 1 for d in range(x.ndim)]
    scale, zero_point = scale.reshape(along), zero_point.reshape(along)
    double = x.dtype == torch.float64 or zero_point.is_floating_point()
    held = torch.float64 if double else torch.float32
    return _parts(x, scale, scale.reciprocal(), zero_point, quant_min, quant_max, held)


def _parts(
    x: Tensor,
    scale: Tensor | float,
    inverse: Tensor | float,
    zero: Tensor | float,
    low: int,
    high: int,
    held: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Rounded to a multiple of the scale and held within so many of them, in which precision `held` says; and which
    elements needed no holding. A zero that is no whole number is added before rounding."""
    wide = x if x.dtype == torch.float64 else x.float()
    if isinstance(zero, Tensor) and zero.is_floating_point():
        number = (wide * inverse + zero).round()
    else:
        number = (wide * inverse).round() + zero
    kept = (number >= low) & (number <= high)
    return [((number.clamp(low, high).to(held) - zero) * scale).to(x.dtype), kept]


PARTS: dict[OpOverload, Callable[..., list[Tensor]]] = {
    torch.ops.aten.fake_quantize_per_tensor_affine_cachemask.default: per_tensor,
    torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: per_tensor_by,
    torch.ops.aten.fake_quantize_per_channel_affine_cachemask.default: per_channel,
}
