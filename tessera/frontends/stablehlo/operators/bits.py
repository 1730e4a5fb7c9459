"""Bits of integers: logic, shifts, counts. Truth values are integers of one bit."""

from __future__ import annotations

import torch

from tessera.frontends.stablehlo.operators.arithmetic import Operand, both
from tessera.frontends.stablehlo.registry import Site, elementwise


@elementwise("and", numbers=True)
def and_(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    return a & b  # type: ignore[operator,return-value]


@elementwise("or", numbers=True)
def or_(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    return a | b  # type: ignore[operator,return-value]


@elementwise("xor", numbers=True)
def xor(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    return a ^ b  # type: ignore[operator,return-value]


@elementwise("not")
def not_(site: Site, x: torch.Tensor) -> torch.Tensor:
    return site.element.wrap(~x)


@elementwise("shift_left", numbers=True)
def shift_left(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    bits = site.element.bits
    x, count = both(a, b)
    if isinstance(b, int):
        return site.element.wrap(x << b) if 0 <= b < bits else torch.zeros_like(x)
    within = (count >= 0) & (count < bits)
    return torch.where(within, site.element.wrap(x << torch.where(within, count, 0)), 0)


@elementwise("shift_right_arithmetic", numbers=True)
def shift_right_arithmetic(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    bits, last = site.element.bits, site.element.bits - 1
    x, count = both(a, b)
    if site.element.kind == "uint" and bits < 64:  # the highest bit is a sign here, too
        x = torch.where(x >> last == 1, x - (1 << bits), x) if x.dtype != torch.uint8 else x.to(torch.int8)
    if isinstance(b, int):
        return site.element.wrap((x >> (b if 0 <= b < bits else last)).to(site.element.held))
    within = (count >= 0) & (count < bits)
    return site.element.wrap((x >> torch.where(within, count, last).to(x.dtype)).to(site.element.held))


@elementwise("shift_right_logical", numbers=True)
def shift_right_logical(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    bits = site.element.bits
    x, count = both(a, b)
    plain = site.element.kind == "uint" and bits < 64  # never negative as they are held
    if isinstance(b, int):
        if not 0 <= b < bits:
            return torch.zeros_like(x)
        return x >> b if plain or b == 0 else (x >> b) & ((1 << (bits - b)) - 1)
    within = (count >= 0) & (count < bits)
    count = torch.where(within, count, 0)
    shifted = x >> count
    if not plain:  # what comes from above is the sign: keep the bits below it
        keep = torch.where(count == 0, -1, ~(torch.full_like(x, -1) << (bits - count)))
        shifted = shifted & keep
    return torch.where(within, shifted, 0)


def unsigned_bits(site: Site, x: torch.Tensor) -> torch.Tensor:
    """The bits of a number in int64; of 64 bits, the highest is the sign."""
    bits = site.operand(0).element.bits
    wide = x.to(torch.int64)
    return wide if bits == 64 else wide & ((1 << bits) - 1)


@elementwise("popcnt")
def population_count(site: Site, x: torch.Tensor) -> torch.Tensor:
    wide = unsigned_bits(site, x)
    count = sum((wide >> place) & 1 for place in range(site.element.bits))
    return count.to(x.dtype)  # type: ignore[union-attr]


@elementwise("count_leading_zeros")
def count_leading_zeros(site: Site, x: torch.Tensor) -> torch.Tensor:
    wide, bits = unsigned_bits(site, x), site.element.bits
    count = torch.zeros_like(wide)
    seen = torch.zeros_like(wide, dtype=torch.bool)
    for place in reversed(range(bits)):
        seen = seen | (((wide >> place) & 1) == 1)
        count = count + (~seen).to(torch.int64)
    return count.to(x.dtype)
