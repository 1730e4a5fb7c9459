"""Unsigned numbers of 64 bits, held as the bits of int64: adding and multiplying are the same, the rest stands here."""

from __future__ import annotations

import torch

_LOWEST = -(1 << 63)


def ordered(x: torch.Tensor) -> torch.Tensor:
    """Numbers whose order as signed ones is the order of these as unsigned ones; its own inverse."""
    return x ^ _LOWEST


def shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Towards the lowest bit, with zeros from above; `count` is from 1 to 63."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Rounded down; by zero, all ones."""
    safe = torch.where(b <= 0, torch.ones_like(b), b)
    half = torch.div(shift_right(a, 1), safe, rounding_mode="floor") << 1
    rest = a - half * safe
    quotient = half + (ordered(rest) >= ordered(safe)).to(a.dtype)
    large = (ordered(a) >= ordered(b)).to(a.dtype)  # the divisor has its highest bit set: it fits once or not at all
    return torch.where(b == 0, -1, torch.where(b < 0, large, quotient))


def to_float(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded once: half of a large number keeps its lost bit, so that it rounds as the whole would."""
    halved = (shift_right(x, 1) | (x & 1)).to(dtype) * 2
    return torch.where(x < 0, halved, x.to(dtype))


def from_float(x: torch.Tensor) -> torch.Tensor:
    """Towards zero, within the range; NaN is zero."""
    wide = torch.nan_to_num(x.double(), nan=0.0, posinf=2.0**64, neginf=0.0).clamp(min=0.0)
    high = wide >= 2.0**63
    low_part = torch.where(high, wide - 2.0**63, wide).clamp(max=2.0**63 - 1024).to(torch.int64)
    return torch.where(wide >= 2.0**64, -1, torch.where(high, low_part ^ _LOWEST, low_part))
