"""Floats that torch does not compute with: their formats, rounding to them, and reading their bits.

In: float32 (or wider) tensors. Out: the same dtype, each number one that the format has, by rounding to the nearest,
ties to even. Formats differ in how they end: with an infinity, with a NaN alone, or with neither (they saturate).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    exponent: int  # bits
    mantissa: int
    bias: int
    # "inf": infinities and NaNs as IEEE; "nan": a NaN at the end; "zero": NaN in place of -0; "none": saturates
    ends: str

    @property
    def smallest_exponent(self) -> int:
        return 1 - self.bias

    @property
    def largest(self) -> float:
        top = (1 << self.exponent) - 1 - self.bias
        if self.ends == "inf":
            return 2.0 ** (top - 1) * (2 - 2.0**-self.mantissa)
        if self.ends == "nan":  # the largest mantissa is the NaN; without a mantissa, so is the largest exponent
            return 2.0**top * (2 - 2.0 ** (1 - self.mantissa)) if self.mantissa else 2.0 ** (top - 1)
        return 2.0**top * (2 - 2.0**-self.mantissa)


FORMATS: dict[str, Format] = {
    "f8E4M3FN": Format(4, 3, 7, "nan"),
    "f8E5M2": Format(5, 2, 15, "inf"),
    "f8E4M3": Format(4, 3, 7, "inf"),
    "f8E3M4": Format(3, 4, 3, "inf"),
    "f8E4M3FNUZ": Format(4, 3, 8, "zero"),
    "f8E5M2FNUZ": Format(5, 2, 16, "zero"),
    "f8E4M3B11FNUZ": Format(4, 3, 11, "zero"),
    "f8E8M0FNU": Format(8, 0, 127, "nan"),
    "f6E2M3FN": Format(2, 3, 1, "none"),
    "f6E3M2FN": Format(3, 2, 3, "none"),
    "f4E2M1FN": Format(2, 1, 1, "none"),
}


def round_mantissa(x: torch.Tensor, mantissa: int, smallest_exponent: int) -> torch.Tensor:
    """The nearest number with so many bits after the first, ties to even; below the smallest exponent the last bit
    stays."""
    wide = x.double()
    _, exponent = torch.frexp(wide)  # x = m * 2**exponent with m in [0.5, 1)
    unit = torch.clamp(exponent - 1, min=smallest_exponent) - mantissa
    rounded = torch.ldexp(torch.round(torch.ldexp(wide, -unit)), unit)
    return torch.where(torch.isfinite(wide), rounded, wide)


def round_to(x: torch.Tensor, format: Format) -> torch.Tensor:
    rounded = round_mantissa(x, format.mantissa, format.smallest_exponent)
    over = rounded.abs() > format.largest
    if format.ends == "inf":
        rounded = torch.where(over, torch.copysign(torch.full_like(rounded, torch.inf), rounded), rounded)
    elif format.ends == "none":
        rounded = torch.clamp(rounded, -format.largest, format.largest)
    else:
        rounded = torch.where(over, torch.nan, rounded)
    if format.ends == "zero":  # there is no -0
        rounded = rounded + 0.0
    if format.exponent == 8 and not format.mantissa:  # E8M0 has neither a sign nor a zero
        rounded = torch.where(rounded <= 0, torch.nan, rounded)
    return rounded.to(x.dtype)


def from_bits(bits: torch.Tensor, format: Format) -> torch.Tensor:
    """The numbers that these bits (of int64) are, as float32."""
    if not format.mantissa:  # E8M0: the exponent alone
        number = torch.ldexp(torch.ones((), dtype=torch.float64), bits - format.bias)
        return torch.where(bits == (1 << format.exponent) - 1, torch.nan, number).float()
    fraction = bits & ((1 << format.mantissa) - 1)
    exponent = (bits >> format.mantissa) & ((1 << format.exponent) - 1)
    negative = (bits >> (format.mantissa + format.exponent)) & 1
    normal = exponent > 0
    digits = (fraction + torch.where(normal, 1 << format.mantissa, 0)).double()
    power = torch.where(normal, exponent, 1) - format.bias - format.mantissa
    number = torch.ldexp(digits, power)
    top = (1 << format.exponent) - 1
    if format.ends == "inf":
        ended = torch.where(fraction == 0, torch.inf, torch.nan)
        number = torch.where(exponent == top, ended, number)
    elif format.ends == "nan":
        number = torch.where((exponent == top) & (fraction == (1 << format.mantissa) - 1), torch.nan, number)
    number = torch.where(negative == 1, -number, number)
    if format.ends == "zero":
        number = torch.where(bits == 1 << (format.mantissa + format.exponent), torch.nan, number)
    return number.float()
