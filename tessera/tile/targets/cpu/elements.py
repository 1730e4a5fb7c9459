"""Element types on the CPU: how they stand in memory, in registers, and how they convert.

i1 is one byte in memory and one bit in registers. f16 and bf16 are 16 bits in both, f8E4M3FN and f8E5M2 are 8: they are
only carried; arithmetic takes their float32 value. bf16 and those of 8 bits convert by integer operations, to nearest
even.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import (
    BFloat16Type,
    Float8E4M3FNType,
    Float8E5M2Type,
    Float16Type,
    Float32Type,
    Float64Type,
    IntegerType,
    Signedness,
)
from xdsl.ir import Attribute

from tessera.tile.targets.cpu.code import V
from tessera.tile.targets.cpu.eight_bits import FORMATS, from_bits, to_bits
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.util.errors import OptionError


@dataclass(frozen=True)
class Element:
    name: str  # as tile text spells it
    register: str  # LLVM type of a value
    memory: str  # LLVM type in a buffer
    unsigned: bool = False

    @property
    def is_float(self) -> bool:
        return self.register in ("float", "double") or self.short

    @property
    def short(self) -> bool:
        return self.name in ("f16", "bf16", *FORMATS)


F32 = Element("f32", "float", "float")
I64 = Element("i64", "i64", "i64")


def element(attribute: Attribute) -> Element:
    match attribute:
        case Float32Type():
            return F32
        case Float64Type():
            return Element("f64", "double", "double")
        case Float16Type():
            return Element("f16", "i16", "i16")
        case BFloat16Type():
            return Element("bf16", "i16", "i16")
        case Float8E4M3FNType():
            return Element("f8", "i8", "i8")
        case Float8E5M2Type():
            return Element("f8e5", "i8", "i8")
        case IntegerType(width=width, signedness=sign) if width.data in (1, 8, 16, 32, 64):
            bits = width.data
            unsigned = bits == 1 or sign.data == Signedness.UNSIGNED
            return Element(f"i{bits}", f"i{bits}", f"i{max(bits, 8)}", unsigned)
    raise OptionError(f"expected an element type of the cpu target (f16 … f64, i1 … i64), got {attribute}")


def truth(b: Code, x: V, e: Element) -> V:
    """x != 0; NaN is true."""
    if x.elem == "i1":
        return x
    if e.short:
        x, e = widen(b, x, e), F32
    return b.compare("une" if e.is_float else "ne", x, b.like(x, 0))


def widen(b: Code, x: V, e: Element) -> V:
    """The float32 value of a short float."""
    if e.name in FORMATS:
        return from_bits(b, x, FORMATS[e.name])
    if e.name == "bf16":
        wide = b.bin("shl", b.convert("zext", x, "i32"), b.const("i32", 16))
        return b.convert("bitcast", wide, "float")
    return b.convert("fpext", b.convert("bitcast", x, "half"), "float")


def narrow(b: Code, x: V, e: Element) -> V:
    """float32 to a short float, to nearest even."""
    if e.name in FORMATS:
        return to_bits(b, x, FORMATS[e.name])
    if e.name == "f16":
        if not b.host.half:
            raise OptionError("float16 on the cpu target needs a processor with F16C; try bfloat16 or float32")
        return b.convert("bitcast", b.convert("fptrunc", x, "half"), "i16")
    i = b.convert("bitcast", x, "i32")
    last = b.bin("and", b.bin("lshr", i, b.const("i32", 16)), b.const("i32", 1))
    up = b.bin("add", b.bin("add", i, last), b.const("i32", 0x7FFF))
    short = b.convert("trunc", b.bin("lshr", up, b.const("i32", 16)), "i16")
    return b.select(b.compare("uno", x, x), b.like(short, 0x7FC0), short)


def cast(b: Code, x: V, source: Element, to: Element) -> V:
    """As PyTorch's `.to` converts: floats to integers toward zero, anything to i1 by being different from zero."""
    if source == to:
        return x
    if to.name == "i1":
        return truth(b, x, source)
    if source.short:
        x, source = widen(b, x, source), F32
    if to.short:
        return narrow(b, cast(b, x, source, F32), to)
    if source.is_float and to.is_float:
        if source.register == to.register:
            return x
        return b.convert("fpext" if to.register == "double" else "fptrunc", x, to.register)
    if source.is_float:
        # C converts to short integers by way of i32, keeping its low bits.
        wide = to.register if to.register == "i64" else "i32"
        if to.unsigned:
            wide = "i64"
        # LLVM drops whatever is computed with a number that does not fit, or is none; C takes some whole number.
        x = b.freeze(b.convert("fptosi", x, wide))
        return x if wide == to.register else b.convert("trunc", x, to.register)
    if to.is_float:
        return b.convert("uitofp" if source.unsigned else "sitofp", x, to.register)
    have, want = int(x.elem[1:]), int(to.register[1:])
    if have == want:
        return x
    return b.convert("trunc" if have > want else "zext" if source.unsigned else "sext", x, to.register)
