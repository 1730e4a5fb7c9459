"""Powers as IEEE 754 has them, which files mean: PyTorch has them too, but for exponents that are numbers."""

from __future__ import annotations

import math

import torch


def power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    """PyTorch takes ±0.5 for square roots. Of -0 and -inf these are others: a root keeps the sign of -0, and of -inf
    there is none."""
    if exponent == 0.5:
        return torch.where(x == -math.inf, math.inf, torch.sqrt(x + 0.0))
    if exponent == -0.5:
        return torch.where(x == -math.inf, 0.0, torch.rsqrt(x + 0.0))
    return torch.pow(x, exponent)
