"""Floats of 8 bits on the CPU: how float32 becomes one, to nearest even, and back, by integer operations.

A sign, then the exponent, then the mantissa. f8E4M3FN has no infinities: what is too large becomes its largest number,
448, and all ones are NaN. f8E5M2 has them, as float16 does: what is too large becomes infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.tile.targets.cpu.code import V
from tessera.tile.targets.cpu.host import HostCode as Code

NAN = 0x7F


@dataclass(frozen=True)
class Format:
    mantissa: int  # bits
    bias: int  # of the exponent
    beyond: int  # the bits of what is too large
    infinite: bool  # whether they are those of infinity

    @property
    def shift(self) -> int:
        """Bits of float32's mantissa that are rounded away."""
        return 23 - self.mantissa

    @property
    def rebias(self) -> int:
        """What float32's exponent is larger by."""
        return 127 - self.bias

    @property
    def least(self) -> int:
        """The exponent of the least number above zero."""
        return 1 - self.bias - self.mantissa


FORMATS = {"f8": Format(3, 7, 0x7E, infinite=False), "f8e5": Format(2, 15, 0x7C, infinite=True)}


def to_bits(b: Code, x: V, f: Format) -> V:
    i = b.convert("bitcast", x, "i32")
    size = b.bin("and", i, b.const("i32", 0x7FFFFFFF))
    last = b.bin("and", b.bin("lshr", size, b.const("i32", f.shift)), b.const("i32", 1))
    rebased = b.bin("sub", size, b.const("i32", (f.rebias << 23) - ((1 << (f.shift - 1)) - 1)))
    normal = b.bin("lshr", b.bin("add", rebased, last), b.const("i32", f.shift))
    # Added to less than the least normal number, this leaves multiples of the least number in the last bits.
    shifted = b.fadd(b.convert("bitcast", size, "float"), b.const("float", 2.0 ** (23 + f.least)))
    small = b.bin("sub", b.convert("bitcast", shifted, "i32"), b.const("i32", (127 + 23 + f.least) << 23))
    bits = b.select(b.compare("ult", size, b.like(size, (f.rebias + 1) << 23)), small, normal)
    bits = b.select(b.compare("ugt", bits, b.like(bits, f.beyond)), b.like(bits, f.beyond), bits)
    bits = b.select(b.compare("uno", x, x), b.like(bits, NAN), bits)
    sign = b.bin("and", b.bin("lshr", i, b.const("i32", 24)), b.const("i32", 0x80))
    return b.convert("trunc", b.bin("or", bits, sign), "i8")


def from_bits(b: Code, x: V, f: Format) -> V:
    i = b.convert("zext", x, "i32")
    size = b.bin("and", i, b.const("i32", 0x7F))
    normal = b.bin("add", b.bin("shl", size, b.const("i32", f.shift)), b.const("i32", f.rebias << 23))
    small = b.convert("bitcast", b.fmul(b.convert("uitofp", size, "float"), b.const("float", 2.0**f.least)), "i32")
    bits = b.select(b.compare("ult", size, b.like(size, 1 << f.mantissa)), small, normal)
    bits = b.select(b.compare("ugt", size, b.like(size, f.beyond)), b.like(bits, 0x7FC00000), bits)
    if f.infinite:
        bits = b.select(b.compare("eq", size, b.like(size, f.beyond)), b.like(bits, 0x7F800000), bits)
    sign = b.bin("shl", b.bin("and", i, b.const("i32", 0x80)), b.const("i32", 24))
    return b.convert("bitcast", b.bin("or", bits, sign), "float")
