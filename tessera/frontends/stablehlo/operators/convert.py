"""Converting between element types, and looking at bits as another type."""

from __future__ import annotations

import torch

from tessera.frontends.stablehlo import unsigned64
from tessera.frontends.stablehlo.elements import Element
from tessera.frontends.stablehlo.narrow import from_bits, round_mantissa
from tessera.frontends.stablehlo.registry import NoMeaningError, Site, elementwise, meaning


@elementwise("convert")
def convert(site: Site, x: torch.Tensor) -> torch.Tensor:
    return converted(x, site.operand(0).element, site.element)


def converted(x: torch.Tensor, given: Element, wanted: Element) -> torch.Tensor:
    if given == wanted:
        return x
    if given.kind == "complex" and wanted.kind != "complex":
        x = x.real
    if wanted.kind == "bool":
        return x != 0
    if wanted.integer:
        if given.floating or given.kind == "complex":
            return _whole(x, wanted)
        return wanted.wrap(x.to(wanted.held))
    if wanted.format is not None:  # rounded from what was given, once
        wide = unsigned64.to_float(x, torch.float64) if given.unsigned64 else x.double() if given.integer else x
        return wanted.wrap(wide.float() if wide.dtype != torch.float64 else wide).to(wanted.held)
    if given.unsigned64:
        dtype = wanted.held.to_real()
        return unsigned64.to_float(x, dtype).to(wanted.held)
    return x.to(wanted.held)


def _whole(x: torch.Tensor, wanted: Element) -> torch.Tensor:
    """Towards zero, within the range of the integers; NaN is zero."""
    if wanted.unsigned64:
        return unsigned64.from_float(x)
    if wanted.bits == 64:
        wide = torch.nan_to_num(x.double(), nan=0.0, posinf=2.0**63, neginf=-(2.0**63))
        inside = wide.clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)
        return torch.where(wide >= 2.0**63, wanted.high, inside)
    wide = x if x.dtype == torch.float64 or wanted.bits <= 16 and x.dtype == torch.float32 else x.double()
    inside = torch.nan_to_num(wide, nan=0.0).clamp(wanted.low, wanted.high)
    return inside.to(wanted.held)


@elementwise("reduce_precision")
def reduce_precision(site: Site, x: torch.Tensor) -> torch.Tensor:
    exponent, mantissa = site["exponent_bits"], site["mantissa_bits"]
    bias = (1 << (exponent - 1)) - 1
    own = torch.finfo(x.dtype)
    smallest = 1 - bias
    rounded = round_mantissa(x, mantissa, -1075)  # numbers below the range become zeros, not subnormal
    largest = 2.0**bias * (2 - 2.0**-mantissa)
    infinite = torch.copysign(torch.full_like(rounded, torch.inf), rounded)
    rounded = torch.where(rounded.abs() > min(largest, own.max), infinite, rounded)
    if 2.0**smallest > own.tiny:
        rounded = torch.where(
            rounded.abs() < 2.0**smallest, torch.copysign(torch.zeros_like(rounded), rounded), rounded
        )
    return rounded.to(x.dtype)


@meaning("bitcast_convert")
def bitcast_convert(site: Site, x: torch.Tensor) -> torch.Tensor:
    given, wanted = site.operand(0).element, site.element
    if given == wanted:
        return x
    if given.bits == wanted.bits and {given.kind, wanted.kind} <= {"int", "uint"}:
        return wanted.wrap(x.to(wanted.held)) if wanted.kind == "uint" or given.bits < 8 else _signed(x, wanted)
    if any(e.bits < 8 or e.kind == "complex" or (e.format and e.dtype == e.held) for e in (given, wanted)):
        return _few_bits(x, given, wanted)
    own = given.leave(x).contiguous()
    if wanted.bits > given.bits:  # the last dimension becomes bits of one element
        return wanted.enter(own.view(wanted.dtype).squeeze(-1))
    if wanted.bits < given.bits:
        return wanted.enter(own.unsqueeze(-1).view(wanted.dtype))
    return wanted.enter(own.view(wanted.dtype))


def _signed(x: torch.Tensor, wanted: Element) -> torch.Tensor:
    """Integers of the same width: unsigned ones above the range are negative."""
    return x.to(wanted.held)


def _few_bits(x: torch.Tensor, given: Element, wanted: Element) -> torch.Tensor:
    """Through the bits in int64, lowest first."""
    if not given.integer or not (wanted.integer or wanted.format):
        raise NoMeaningError(f"bitcast_convert from {given.name} to {wanted.name} has no meaning here")
    mask = (1 << given.bits) - 1 if given.bits < 64 else -1
    bits = x.to(torch.int64) & mask
    if wanted.bits > given.bits:
        places = torch.arange(bits.shape[-1], device=x.device) * given.bits
        bits = (bits << places).sum(-1)
    elif wanted.bits < given.bits:
        places = torch.arange(given.bits // wanted.bits, device=x.device) * wanted.bits
        bits = (bits.unsqueeze(-1) >> places) & ((1 << wanted.bits) - 1)
    if wanted.format is not None:
        return from_bits(bits, wanted.format)
    return wanted.wrap(bits).to(wanted.held)
