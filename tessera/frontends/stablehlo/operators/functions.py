"""Functions of one number, and of two where they are no arithmetic. torch has nearly all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.frontends.stablehlo.operators.special import precise
from tessera.frontends.stablehlo.registry import Site, elementwise


def cbrt(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        return torch.pow(x, 1 / 3)
    wide = x if x.dtype == torch.float64 else x.float()
    root = torch.copysign(wide.abs() ** (1 / 3), wide)
    safe = torch.where((root == 0) | ~torch.isfinite(root), 1, root)
    better = safe - (safe - wide / (safe * safe)) / 3  # a step of Newton's: 1 / 3 is rounded
    return torch.where(safe == root, better, root).to(x.dtype)


def round_away(x: torch.Tensor) -> torch.Tensor:
    """To the nearest whole number, halves away from zero."""
    whole = torch.trunc(x)
    return torch.where((x - whole).abs() >= 0.5, whole + torch.sign(x), whole)


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exponential": torch.exp,
    "exponential_minus_one": torch.expm1,
    "log": torch.log,
    "log_plus_one": torch.log1p,
    "logistic": torch.sigmoid,
    "tanh": torch.tanh,
    "sine": torch.sin,
    "cosine": torch.cos,
    "tan": torch.tan,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "cbrt": cbrt,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round_nearest_even": torch.round,
    "round_nearest_afz": round_away,
}


def _enter(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    @elementwise(name)
    def run(site: Site, x: torch.Tensor) -> torch.Tensor:
        return site.element.wrap(precise(function, x))


for _name, _function in _FUNCTIONS.items():
    _enter(_name, _function)


@elementwise("is_finite")
def is_finite(site: Site, x: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(x)


@elementwise("real")
def real(site: Site, x: torch.Tensor) -> torch.Tensor:
    return x.real if x.is_complex() else x


@elementwise("imag")
def imag(site: Site, x: torch.Tensor) -> torch.Tensor:
    return x.imag if x.is_complex() else torch.zeros_like(x)


@elementwise("complex")
def complex_(site: Site, re: torch.Tensor, im: torch.Tensor) -> torch.Tensor:
    return torch.complex(re, im)


@elementwise("atan2")
def atan2(site: Site, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        return -1j * torch.log((x + 1j * y) / torch.sqrt(x * x + y * y))
    return site.element.wrap(torch.atan2(y, x))
