"""Uniform quantization. A quantized tensor is held by the integers that store it; its type says what they stand for.

Operations that only move elements move the integers. Every other operation on quantized numbers is the same operation
on the numbers that they stand for, rounded back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tessera.frontends.stablehlo.elements import Quantized
from tessera.frontends.stablehlo.module import Tensor, Type
from tessera.frontends.stablehlo.registry import Row, Site, meaning


def dequantize(x: torch.Tensor, q: Quantized) -> torch.Tensor:
    scale, zero = parameters(x, q)
    return (x.to(torch.int64) - zero).to(q.expressed.held) * scale


def quantize(x: torch.Tensor, q: Quantized) -> torch.Tensor:
    scale, zero = parameters(x, q)
    placed = torch.round(x / scale).double() + zero
    return torch.nan_to_num(placed, nan=0.0).clamp(q.smallest, q.largest).to(q.held)


def parameters(x: torch.Tensor, q: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in the type of the numbers, and zero points, shaped as to go with `x`."""
    shape = [1] * x.ndim
    if q.axis is not None:
        shape[q.axis] = -1
    scale = torch.tensor(q.scales, dtype=torch.float64).to(q.expressed.held).to(x.device)
    zero = torch.tensor(q.zeros, dtype=torch.int64, device=x.device)
    return scale.reshape(shape), zero.reshape(shape)


@meaning("uniform_quantize", storage=True)
def uniform_quantize(site: Site, x: torch.Tensor) -> torch.Tensor:
    given, wanted = site.operand(0).element, site.element
    assert isinstance(wanted, Quantized)
    if isinstance(given, Quantized):
        x = dequantize(x, given)
    return quantize(x, wanted)


@meaning("uniform_dequantize", storage=True)
def uniform_dequantize(site: Site, x: torch.Tensor) -> torch.Tensor:
    given = site.operand(0).element
    assert isinstance(given, Quantized)
    return dequantize(x, given)


def expressed(type_: Type) -> Type:
    if isinstance(type_, Tensor) and isinstance(type_.element, Quantized):
        return replace(type_, element=type_.element.expressed)
    return type_


def through_floats(
    row: Row, site: Site, operands: Sequence[torch.Tensor], apply: Callable[[Row, Site, tuple], object]
) -> object:
    """The operation on what the integers stand for, and the result as integers again."""
    types = site.operation.operand_types
    floats = tuple(
        dequantize(x, t.element) if isinstance(t, Tensor) and isinstance(t.element, Quantized) else x
        for x, t in zip(operands, types, strict=True)
    )
    plain = site.with_types([expressed(t) for t in types], [expressed(t) for t in site.operation.result_types])
    out = apply(row, plain, floats)
    results = out if isinstance(out, list) else [out]
    quantized = [
        quantize(x, t.element) if isinstance(t, Tensor) and isinstance(t.element, Quantized) else x
        for x, t in zip(results, site.operation.result_types, strict=True)
    ]
    return quantized if isinstance(out, list) else quantized[0]
