"""Rounding to whole numbers of a few bits."""

from __future__ import annotations

import torch

from tessera.frontends.onnx.elements import RANGES


def bounds(dtype: torch.dtype, code: int = 0) -> tuple[int, int]:
    if code in RANGES:
        return RANGES[code]
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def quotient(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale to the last bit: what is rounded next must not be on the other side of a half. Kernels divide by one
    number through its reciprocal, which in double precision is close enough."""
    if scale.dtype == torch.float64:
        return x / scale
    return (x.double() / scale.double()).to(scale.dtype)


def requantized(x: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Rounded, moved by the zero point, and kept in its type's range."""
    low, high = bounds(zero.dtype)
    moved = torch.round(x.float()) + zero.to(torch.float32)
    return torch.clamp(moved, low, high).to(zero.dtype)
