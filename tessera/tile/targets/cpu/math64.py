"""Functions that need double precision: pow of float32 (by way of double), and float64 by the C library.

`pow` computes 2^(y log2|x|) in doubles, which leaves room for a result within one unit in the last place, and then
puts in the sign and the many special cases of C's powf.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tessera.tile.targets.cpu.code import V
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.tile.targets.cpu.math import at_least, at_most, bits, poly, unbits

# log2((1 + s) / (1 - s)) / s in powers of s², and 2^r on [-1/2, 1/2].
LOG2_ATANH = (2.8853900817778553, 0.961796694096034, 0.5770779492946443, 0.41220823270884505, 0.3199735559170806,
              0.28081935833109123, 0.023914418673349955)  # fmt: skip
EXP2 = (1.0000000000000115, 0.693147180559953, 0.24022650695636275, 0.055504108664253655, 0.009618129194917701,
        0.0013333558257893848, 0.00015403433011782177, 1.5252642554699175e-05, 1.325981487519025e-06,
        1.0211290508851782e-07)  # fmt: skip
MAGIC = 6755399441055744.0  # 1.5 * 2^52
SQRT_HALF = 0x3FE6A09E667F3BCD
ONE = 0x3FF0000000000000


def _log2(b: Code, x: V) -> V:
    """Of a positive, finite, normal double."""
    i = bits(b, x)
    raised = b.bin("lshr", b.bin("add", i, b.const("i64", ONE - SQRT_HALF)), b.const("i64", 52))
    m = unbits(b, b.bin("sub", i, b.bin("shl", b.bin("sub", raised, b.const("i64", 1023)), b.const("i64", 52))))
    e = b.fsub(b.convert("sitofp", b.convert("trunc", raised, "i32"), "double"), b.like(x, 1023.0))
    s = b.fdiv(b.fsub(m, b.like(x, 1.0)), b.fadd(m, b.like(x, 1.0)))
    return b.fma(s, poly(b, b.fmul(s, s), LOG2_ATANH), e)


def _exp2(b: Code, x: V) -> V:
    """For |x| below 1000; NaN stays."""
    magic = b.like(x, MAGIC)
    t = b.fadd(x, magic)
    p = poly(b, b.fsub(x, b.fsub(t, magic)), EXP2)
    factor = b.bin("shl", b.bin("add", bits(b, t), b.const("i64", 1023)), b.const("i64", 52))
    return b.fmul(p, unbits(b, factor))


def pow32(b: Code, x: V, y: V) -> V:
    x, y = b.match(x, y)
    zero, one, inf = b.like(x, 0.0), b.like(x, 1.0), b.like(x, math.inf)
    size = b.call("fabs", x)
    log = _log2(b, b.convert("fpext", size, "double"))
    log = b.select(b.compare("oeq", size, zero), b.like(log, -math.inf), log)
    log = b.select(b.compare("oeq", size, inf), b.like(log, math.inf), log)
    power = b.fmul(log, b.convert("fpext", y, "double"))
    power = b.select(b.compare("oeq", size, one), b.like(log, 0.0), power)  # 1 to an infinite power
    r = b.convert("fptrunc", _exp2(b, at_least(b, at_most(b, power, 300.0), -300.0)), "float")

    whole = b.compare("oeq", b.call("trunc", y), y)
    half = b.fmul(y, b.like(y, 0.5))
    odd = b.bin("and", whole, b.compare("one", b.call("trunc", half), half))
    negative = b.compare("slt", bits(b, x), b.const("i32", 0))
    r = b.select(b.bin("and", negative, odd), b.fneg(r), r)
    inside = b.bin("and", b.compare("olt", x, zero), b.compare("one", size, inf))
    r = b.select(b.bin("and", inside, b.bin("xor", whole, b.like(whole, 1))), b.like(x, math.nan), r)
    r = b.select(b.compare("uno", x, y), b.like(x, math.nan), r)
    return b.select(b.bin("or", b.compare("oeq", y, zero), b.compare("oeq", x, one)), one, r)


def _library(name: str) -> Callable[[Code, V], V]:
    return lambda b, x: b.each_lane(name, x)


def _sigmoid(b: Code, x: V) -> V:
    return b.fdiv(b.like(x, 1.0), b.fadd(b.each_lane("exp", b.fneg(x)), b.like(x, 1.0)))


FLOAT64: dict[str, Callable[[Code, V], V]] = {
    **{n: _library(n) for n in ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "erf", "sin", "cos"]},
    "sigmoid": _sigmoid,
    "rsqrt": lambda b, x: b.fdiv(b.like(x, 1.0), b.call("sqrt", x)),
}
