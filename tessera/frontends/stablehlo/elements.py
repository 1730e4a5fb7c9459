"""Element types of StableHLO, and the torch dtypes that hold them while a program runs.

torch computes with some of them only in part, so a value is held by a dtype that computes (`held`) and turned into the
type's own dtype (`dtype`) where it enters and leaves the program:

- ui16 and ui32 are held by the next wider signed type, ui64 by the bits of int64, which `unsigned64.py` compares and
  divides;
- i2 and i4 are held by int8, ui2 and ui4 by uint8: `wrap` brings results back into their range;
- float8 and narrower floats are held by float32 and rounded after every operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tessera.frontends.stablehlo.narrow import FORMATS, Format, round_to


@dataclass(frozen=True)
class Element:
    name: str
    held: torch.dtype
    dtype: torch.dtype
    kind: str  # bool, int, uint, float, complex
    bits: int

    @property
    def integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def floating(self) -> bool:
        return self.kind == "float"

    @property
    def unsigned64(self) -> bool:
        return self.name == "ui64"

    @property
    def format(self) -> Format | None:
        return FORMATS.get(self.name)

    @property
    def low(self) -> int:
        """The smallest value as it is held."""
        return 0 if self.kind == "uint" and self.bits < 64 else -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """The largest value as it is held."""
        return (1 << self.bits) - 1 if self.kind == "uint" and self.bits < 64 else (1 << (self.bits - 1)) - 1

    def wrap(self, x: torch.Tensor) -> torch.Tensor:
        """A result of arithmetic as this type has it: modulo its range, or rounded."""
        if self.integer and self.held.itemsize * 8 != self.bits:
            x = x & ((1 << self.bits) - 1)
            return x if self.kind == "uint" else torch.where(x > self.high, x - (1 << self.bits), x)
        return round_to(x, self.format) if self.format is not None else x

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of the type's own dtype, as programs hold it."""
        if x.dtype == self.held:
            return x
        if self.kind == "uint":  # torch converts few unsigned types; signed ones of the same width have the same bits
            signed = x.view(_SIGNED[x.dtype]).to(self.held)
            return self.wrap(signed)
        return x.to(self.held)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.dtype:
            return x
        if self.kind == "uint":
            return x.to(_SIGNED[self.dtype]).view(self.dtype)
        return x.to(self.dtype)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64, torch.uint8: torch.uint8}


def _integer(name: str, held: torch.dtype, dtype: torch.dtype) -> Element:
    return Element(name, held, dtype, "uint" if name[0] == "u" else "int", int(name.lstrip("ui")))


def _float(name: str, held: torch.dtype, bits: int, dtype: torch.dtype | None = None) -> Element:
    return Element(name, held, dtype or held, "float", bits)


ELEMENTS: dict[str, Element] = {
    e.name: e
    for e in (
        Element("i1", torch.bool, torch.bool, "bool", 1),
        _integer("i2", torch.int8, torch.int8),
        _integer("i4", torch.int8, torch.int8),
        _integer("i8", torch.int8, torch.int8),
        _integer("i16", torch.int16, torch.int16),
        _integer("i32", torch.int32, torch.int32),
        _integer("i64", torch.int64, torch.int64),
        _integer("ui2", torch.uint8, torch.uint8),
        _integer("ui4", torch.uint8, torch.uint8),
        _integer("ui8", torch.uint8, torch.uint8),
        _integer("ui16", torch.int32, torch.uint16),
        _integer("ui32", torch.int64, torch.uint32),
        _integer("ui64", torch.int64, torch.uint64),
        _float("f16", torch.float16, 16),
        _float("bf16", torch.bfloat16, 16),
        _float("f32", torch.float32, 32),
        _float("f64", torch.float64, 64),
        _float("f8E4M3FN", torch.float32, 8, torch.float8_e4m3fn),
        _float("f8E5M2", torch.float32, 8, torch.float8_e5m2),
        _float("f8E4M3FNUZ", torch.float32, 8, torch.float8_e4m3fnuz),
        _float("f8E5M2FNUZ", torch.float32, 8, torch.float8_e5m2fnuz),
        _float("f8E8M0FNU", torch.float32, 8, torch.float8_e8m0fnu),
        *(_float(name, torch.float32, 8) for name in ("f8E4M3", "f8E3M4", "f8E4M3B11FNUZ")),
        *(_float(name, torch.float32, 6) for name in ("f6E2M3FN", "f6E3M2FN")),
        _float("f4E2M1FN", torch.float32, 4),
        Element("complex<f32>", torch.complex64, torch.complex64, "complex", 64),
        Element("complex<f64>", torch.complex128, torch.complex128, "complex", 128),
    )
}
ELEMENTS["index"] = ELEMENTS["i64"]


@dataclass(frozen=True)
class Quantized(Element):
    """A uniformly quantized type: integers that stand for (integer - zero point) * scale. Scale and zero point are the
    same for all elements, or one pair for each index along `axis`."""

    storage: Element = ELEMENTS["i8"]
    expressed: Element = ELEMENTS["f32"]
    scales: tuple[float, ...] = ()
    zeros: tuple[int, ...] = ()
    axis: int | None = None
    smallest: int = -128
    largest: int = 127

    @staticmethod
    def of(
        storage: Element,
        expressed: Element,
        pairs: list[tuple[float, int]],
        axis: int | None,
        ends: tuple[int, int] | None,
    ) -> Quantized:
        low, high = ends or (storage.low, storage.high)
        scales, zeros = tuple(s for s, _ in pairs), tuple(z for _, z in pairs)
        name = f"!quant.uniform<{storage.name}:{expressed.name}>"
        return Quantized(
            name, storage.held, storage.dtype, storage.kind, storage.bits,
            storage, expressed, scales, zeros, axis, low, high,
        )  # fmt: skip
