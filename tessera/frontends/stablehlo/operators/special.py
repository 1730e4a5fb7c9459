"""Functions that torch lacks or does not round well enough."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Function = Callable[[torch.Tensor], torch.Tensor]


def in_double(function: Function) -> Function:
    """The function in double precision, rounded once at the end."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return function(x if x.is_complex() else x.double()).to(x.dtype)

    return run


def precise(function: Function, x: torch.Tensor) -> torch.Tensor:
    """The function; of complex numbers in double precision, since the parts of a result may differ in size by far."""
    return function(x.to(torch.complex128)).to(x.dtype) if x.dtype == torch.complex64 else function(x)


def cosh(x: torch.Tensor) -> torch.Tensor:
    """As CHLO writes it out: halves in the exponents, so that it overflows where the result does."""
    if x.is_complex():
        return torch.cosh(x)
    wide = x.float() if x.dtype.itemsize < 4 else x
    half = math.log(0.5)
    return (torch.exp(wide + half) + torch.exp(half - wide)).to(x.dtype)
