"""Arithmetic, element by element. Integers wrap around; of truth values, sums are `or` and products `and`.

Division by zero gives what XLA gives: all ones, and the dividend as the remainder.
"""

from __future__ import annotations

import torch

from tessera.frontends import powers
from tessera.frontends.stablehlo import unsigned64
from tessera.frontends.stablehlo.registry import Site, elementwise
from tessera.frontends.stablehlo.values import Number

Operand = torch.Tensor | Number


def both(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors; a number becomes one of the other's dtype."""
    if not isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        a = torch.full((), a, dtype=b.dtype, device=b.device)
    if not isinstance(b, torch.Tensor):
        b = torch.full((), b, dtype=a.dtype, device=a.device)
    return a, b


@elementwise("add", numbers=True)
def add(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    return a | b if site.element.kind == "bool" else site.element.wrap(a + b)  # type: ignore[operator,arg-type]


@elementwise("subtract", numbers=True)
def subtract(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    return site.element.wrap(a - b)  # type: ignore[arg-type]


@elementwise("multiply", numbers=True)
def multiply(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    return a & b if site.element.kind == "bool" else site.element.wrap(a * b)  # type: ignore[operator,arg-type]


@elementwise("divide", numbers=True)
def divide(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    if not site.element.integer:
        return site.element.wrap(a / b)  # type: ignore[arg-type]
    x, y = both(a, b)
    if site.element.unsigned64:
        return unsigned64.divide(x, y)
    if not isinstance(b, torch.Tensor) and b not in (0, -1):
        return torch.div(x, b, rounding_mode="trunc")  # type: ignore[arg-type]
    usual = (y != 0) & (y != -1)  # the processor may refuse these: the lowest number has no opposite
    quotient = torch.div(x, torch.where(usual, y, 1), rounding_mode="trunc")
    ones = site.element.high if site.element.kind == "uint" else -1
    quotient = torch.where(y == 0, ones, quotient)
    return site.element.wrap(quotient if site.element.kind == "uint" else torch.where(y == -1, -x, quotient))


@elementwise("remainder", numbers=True)
def remainder(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    x, y = both(a, b)
    if not site.element.integer:
        return site.element.wrap(torch.fmod(x, y))
    if site.element.unsigned64:
        return torch.where(y == 0, x, x - unsigned64.divide(x, y) * y)
    usual = (y != 0) & (y != -1)
    rest = torch.fmod(x, torch.where(usual, y, 1))
    return torch.where(y == 0, x, rest)


@elementwise("power", numbers=True)
def power(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    if not site.element.integer:
        real = isinstance(a, torch.Tensor) and a.is_floating_point() and isinstance(b, float)
        return site.element.wrap(powers.power(a, b) if real else a**b)  # type: ignore[operator,arg-type]
    x, y = both(a, b)
    negative = y < 0
    if site.element.kind == "uint":
        return site.element.wrap(_integer_power(x, y, site.element.bits))
    whole = _integer_power(x, torch.where(negative, 0, y), site.element.bits)
    odd = torch.where((y & 1) == 1, x, 1)  # the inverse is a whole number of 1 and -1 alone
    inverse = torch.where(x == 1, 1, torch.where(x == -1, odd, torch.where(x == 0, -1, 0)))
    return site.element.wrap(torch.where(negative, inverse, whole)).to(site.element.held)


def _integer_power(x: torch.Tensor, y: torch.Tensor, bits: int) -> torch.Tensor:
    """By squaring; torch's own goes through floats for some types."""
    result = torch.ones_like(x)
    for _ in range(bits):
        result = torch.where((y & 1) == 1, result * x, result)
        x = x * x
        y = y >> 1
    return result


@elementwise("maximum", numbers=True)
def maximum(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    return _extremum(site, a, b, largest=True)


@elementwise("minimum", numbers=True)
def minimum(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    return _extremum(site, a, b, largest=False)


def _extremum(site: Site, a: Operand, b: Operand, largest: bool) -> torch.Tensor:
    kind = site.element.kind
    if kind == "bool":
        return a | b if largest else a & b  # type: ignore[operator,return-value]
    pick = torch.maximum if largest else torch.minimum
    if site.element.unsigned64:
        x, y = both(a, b)
        return unsigned64.ordered(pick(unsigned64.ordered(x), unsigned64.ordered(y)))
    if kind == "complex":  # by the real part, then the imaginary one
        x, y = both(a, b)
        first = torch.where(x.real == y.real, x.imag > y.imag, x.real > y.real)
        return torch.where(first == largest, x, y)
    if not isinstance(b, torch.Tensor):
        assert isinstance(a, torch.Tensor)
        return torch.clamp(a, min=b) if largest else torch.clamp(a, max=b)  # type: ignore[arg-type]
    if not isinstance(a, torch.Tensor):
        return torch.clamp(b, min=a) if largest else torch.clamp(b, max=a)  # type: ignore[arg-type]
    return pick(a, b)


@elementwise("negate")
def negate(site: Site, x: torch.Tensor) -> torch.Tensor:
    return site.element.wrap(-x)


@elementwise("abs")
def absolute(site: Site, x: torch.Tensor) -> torch.Tensor:
    return x if site.element.kind == "uint" else site.element.wrap(torch.abs(x))


@elementwise("sign")
def sign(site: Site, x: torch.Tensor) -> torch.Tensor:
    if site.element.kind == "complex":
        return torch.where(torch.isnan(x.real) | torch.isnan(x.imag), complex("nan+nanj"), torch.sgn(x))
    if site.element.unsigned64:
        return (x != 0).to(x.dtype)
    if site.element.floating:  # zeros keep their sign, and NaN is NaN
        return torch.where(torch.isnan(x) | (x == 0), x, torch.sign(x))
    return torch.sign(x)
