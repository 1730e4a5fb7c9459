"""Functions of a float32 on LLVM vectors: polynomials after a reduction of the argument, no tables, few divisions.

Bounds, in units in the last place, on machines with fused multiply-add: exp, exp2, expm1, log, log2, log10, log1p,
tanh, erf, sigmoid, sin, cos at most 2, pow at most 1. Signed zeros, denormals, infinities and NaN come out as in C.
Coefficients are weighted minimax fits, rounded to float32 from the lowest power on. Arguments of sin and cos
beyond 39,000 go to the C library, lane by lane. `math64` holds what double precision needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tessera.tile.targets.cpu.code import V, round_float
from tessera.tile.targets.cpu.host import HostCode as Code

LOG2E = 1.4426950408889634
# ln 2 in two parts, the first with few bits, so that its product with a small integer is exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer that stands in the low bits
MAGIC_BITS = 0x4B400000
SQRT_HALF_BITS = 0x3F3504F3

EXP = (0.4999999403953552, 0.1666651964187622, 0.04166823998093605, 0.008368823677301407, 0.0013823213521391153)
EXP2 = (0.6931471824645996, 0.24022643268108368, 0.05550358444452286, 0.009618998505175114, 0.0013391519896686077,
        0.00015198792971204966)  # fmt: skip
LOG = (0.3333333134651184, -0.2500081956386566, 0.2000124454498291, -0.16623413562774658, 0.1420150250196457,
       -0.13159474730491638, 0.12762713432312012, -0.07637431472539902)  # fmt: skip
TANH = (-0.33333277702331543, 0.13331323862075806, -0.05372953042387962, 0.020604873076081276, -0.0056657190434634686)
ERF = (0.12837915122509003, -0.37612488865852356, 0.11281730979681015, -0.026762966066598892, 0.0049873529933393,
       -0.0005959589616395533)  # fmt: skip
LOG_ERFC = (-0.0002069827023660764, -1.1276274919509888, -0.6372656226158142, -0.10385646671056747,
            0.022189809009432793, -0.0030336962081491947, 0.00019494647858664393)  # fmt: skip
SIN = (-0.1666666716337204, 0.008333372883498669, -0.0001985028648050502, 2.804204768835916e-06)
COS = (0.04166664555668831, -0.0013887309469282627, 2.4432338250335306e-05)
# pi / 2 in three parts of 24 bits.
HALF_PI = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100059336e-15)
TRIG_LIMIT = 39000.0


def poly(b: Code, x: V, coefficients: Sequence[float]) -> V:
    """c0 + c1 x + c2 x² …, by Horner's rule."""
    y = b.like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        y = b.fma(y, x, b.like(x, c))
    return y


def bits(b: Code, x: V) -> V:
    return b.convert("bitcast", x, "i32" if x.elem == "float" else "i64")


def unbits(b: Code, x: V) -> V:
    return b.convert("bitcast", x, "float" if x.elem == "i32" else "double")


def at_most(b: Code, x: V, high: float) -> V:
    """min(x, high); NaN stays."""
    return b.select(b.compare("ogt", x, b.like(x, high)), b.like(x, high), x)


def at_least(b: Code, x: V, low: float) -> V:
    return b.select(b.compare("olt", x, b.like(x, low)), b.like(x, low), x)


def nearest(b: Code, x: V, factor: float, offset: float = 0.0) -> tuple[V, V]:
    """round(x * factor) as a float, and the number whose low bits hold it (plus `offset`)."""
    magic = b.like(x, MAGIC + offset)
    t = b.fma(x, b.like(x, factor), magic)
    return b.fsub(t, magic), t


def scale(b: Code, p: V, n: V, t: V) -> V:
    """p * 2^n over the whole range of results; t holds n as `nearest` left it."""
    if b.host.avx512 and p.lanes >= 16:
        return b.scalef(p, n)
    whole = b.bin("sub", bits(b, t), b.const("i32", MAGIC_BITS))
    half = b.bin("ashr", whole, b.const("i32", 1))  # in two steps, so that neither factor overflows
    for part in (half, b.bin("sub", whole, half)):
        factor = b.bin("shl", b.bin("add", part, b.const("i32", 127)), b.const("i32", 23))
        p = b.fmul(p, unbits(b, factor))
    return p


def _exp_rest(b: Code, x: V, n: V) -> V:
    """x - n ln 2"""
    r = b.fma(n, b.like(x, -LN2_HIGH), x)
    return b.fma(n, b.like(x, -LN2_LOW), r)


def _exp_poly(b: Code, r: V) -> V:
    return b.fma(b.fmul(r, r), poly(b, r, EXP), r)  # e^r - 1


def exp(b: Code, x: V) -> V:
    x = at_least(b, at_most(b, x, 89.0), -104.0)
    n, t = nearest(b, x, LOG2E)
    return scale(b, b.fadd(_exp_poly(b, _exp_rest(b, x, n)), b.like(x, 1.0)), n, t)


def exp_normal(b: Code, x: V) -> V:
    """exp where the result is known to be a normal number."""
    n, t = nearest(b, x, LOG2E, offset=127.0)
    p = b.fadd(_exp_poly(b, _exp_rest(b, x, n)), b.like(x, 1.0))
    return b.fmul(p, unbits(b, b.bin("shl", bits(b, t), b.const("i32", 23))))


def exp2(b: Code, x: V) -> V:
    x = at_least(b, at_most(b, x, 129.0), -151.0)
    n, t = nearest(b, x, 1.0)
    r = b.fsub(x, n)
    return scale(b, b.fma(r, poly(b, r, EXP2), b.like(x, 1.0)), n, t)


def expm1(b: Code, x: V) -> V:
    z = at_least(b, at_most(b, x, 89.0), -18.0)
    n, t = nearest(b, z, LOG2E, offset=126.0)
    q = _exp_poly(b, _exp_rest(b, z, n))
    s = unbits(b, b.bin("shl", bits(b, t), b.const("i32", 23)))  # 2^(n-1), which never overflows
    y = b.fma(s, q, b.fsub(s, b.like(x, 0.5)))
    return b.select(b.compare("oeq", n, b.like(x, 0.0)), b.select(b.compare("oeq", x, b.like(x, 0.0)), x, q),
                    b.fadd(y, y))  # fmt: skip


def _log_split(b: Code, x: V) -> tuple[V, V]:
    """f and e with x = 2^e (1 + f), 1 + f in [sqrt(1/2), sqrt(2)); denormals are scaled up first."""
    small = b.compare("olt", x, b.like(x, 2.0**-126))
    x = b.select(small, b.fmul(x, b.like(x, 2.0**23)), x)
    i = bits(b, x)
    e = b.bin("ashr", b.bin("sub", i, b.const("i32", SQRT_HALF_BITS)), b.const("i32", 23))
    m = unbits(b, b.bin("sub", i, b.bin("shl", e, b.const("i32", 23))))
    shift = b.select(small, b.like(x, -23.0), b.like(x, 0.0))
    return b.fsub(m, b.like(x, 1.0)), b.fadd(b.convert("sitofp", e, "float"), shift)


def _log_tail(b: Code, f: V) -> V:
    """log(1 + f) - f"""
    return b.fmul(b.fmul(f, f), b.fma(f, poly(b, f, LOG), b.like(f, -0.5)))


def _log_edges(b: Code, y: V, x: V, zero: float = 0.0) -> V:
    """-inf where x is `zero`, NaN below it, inf at inf."""
    y = b.select(b.compare("oeq", x, b.like(x, math.inf)), x, y)
    y = b.select(b.compare("ult", x, b.like(x, zero)), b.like(x, math.nan), y)
    return b.select(b.compare("oeq", x, b.like(x, zero)), b.like(x, -math.inf), y)


def log(b: Code, x: V) -> V:
    f, e = _log_split(b, x)
    y = b.fadd(b.fma(e, b.like(x, LN2_LOW), _log_tail(b, f)), f)
    return _log_edges(b, b.fma(e, b.like(x, LN2_HIGH), y), x)


def _log_base(factor: float, two_high: float, two_low: float) -> Callable[[Code, V], V]:
    """log to a base: the factor 1 / ln base, and the base's logarithm of 2 in two parts, the first with few bits."""
    factor_high = round_float(factor)
    factor_low = factor - factor_high

    def lower(b: Code, x: V) -> V:
        f, e = _log_split(b, x)
        tail = b.fmul(_log_tail(b, f), b.like(x, factor))
        tail = b.fma(f, b.like(x, factor_low), tail)
        if two_low:
            tail = b.fma(e, b.like(x, two_low), tail)
        # The larger of the two products is added last.
        y = b.fma(f, b.like(x, factor_high), tail)
        return _log_edges(b, b.fma(e, b.like(x, two_high), y), x)

    return lower


log2 = _log_base(LOG2E, 1.0, 0.0)
log10 = _log_base(1 / math.log(10), 0.30078125, math.log10(2) - 0.30078125)


def log1p(b: Code, x: V) -> V:
    one = b.like(x, 1.0)
    u = b.fadd(x, one)
    i = bits(b, u)
    e = b.bin("ashr", b.bin("sub", i, b.const("i32", SQRT_HALF_BITS)), b.const("i32", 23))
    shifted = b.bin("shl", e, b.const("i32", 23))
    back = unbits(b, b.bin("sub", b.const("i32", 0x3F800000), shifted))  # 2^-e
    near = b.fma(x, back, b.fsub(back, one))  # (1 + x) 2^-e - 1, without rounding 1 + x
    far = b.fsub(unbits(b, b.bin("sub", i, shifted)), one)
    f = b.select(b.compare("ogt", x, b.like(x, 2.0**40)), far, near)
    k = b.convert("sitofp", e, "float")
    y = b.fadd(b.fma(k, b.like(x, LN2_LOW), _log_tail(b, f)), f)
    y = b.select(b.compare("oeq", x, b.like(x, 0.0)), x, b.fma(k, b.like(x, LN2_HIGH), y))
    return _log_edges(b, y, x, -1.0)


def reciprocal(b: Code, x: V) -> V:
    """1 / x for x known to be between 1 and 2^60: an estimate and one Newton step where the machine has one."""
    return b.reciprocal_normal(x)


def sigmoid(b: Code, x: V) -> V:
    """With e = e^-|x|, so that nothing overflows and small results keep their bits: e or 1 over 1 + e."""
    one = b.like(x, 1.0)
    e = exp(b, b.fneg(b.call("fabs", x)))
    d = b.fadd(e, one)
    lost = b.fadd(b.fsub(one, d), e)  # what rounding 1 + e dropped
    r = reciprocal(b, d)
    top = b.select(b.compare("olt", x, b.like(x, 0.0)), e, one)
    q = b.fmul(top, r)
    rest = b.fma(b.fneg(q), lost, b.fma(b.fneg(q), d, top))
    return b.fma(rest, r, q)


def tanh(b: Code, x: V) -> V:
    z = b.call("fabs", x)
    square = b.fmul(x, x)
    near = b.fma(b.fmul(z, square), poly(b, square, TANH), z)
    capped = at_most(b, z, 9.5)
    e = exp_normal(b, b.fadd(capped, capped))
    r = reciprocal(b, b.fadd(e, b.like(x, 1.0)))
    far = b.fma(r, b.like(x, -2.0), b.like(x, 1.0))
    return b.call("copysign", b.select(b.compare("olt", z, b.like(x, 0.625)), near, far), x)


def erf(b: Code, x: V) -> V:
    """x + x P(x²) near zero; beyond, 1 - e^P(x) with a fit of log erfc."""
    z = b.call("fabs", x)
    square = b.fmul(x, x)
    near = b.fma(z, poly(b, square, ERF), z)
    capped = at_most(b, z, 4.0)
    far = b.fsub(b.like(x, 1.0), exp_normal(b, poly(b, capped, LOG_ERFC)))
    return b.call("copysign", b.select(b.compare("olt", z, b.like(x, 0.921875)), near, far), x)


def _trig(name: str, turn: int) -> Callable[[Code, V], V]:
    def lower(b: Code, x: V) -> V:
        if not b.host.fma:
            return b.each_lane(name + "f", x)
        n, t = nearest(b, x, 2 / math.pi)
        r = x
        for part in HALF_PI:
            r = b.fma(n, b.like(x, -part), r)
        square = b.fmul(r, r)
        s = b.fma(b.fmul(r, square), poly(b, square, SIN), r)
        c = b.fma(square, b.fma(square, poly(b, square, COS), b.like(x, -0.5)), b.like(x, 1.0))
        quadrant = b.bin("add", bits(b, t), b.const("i32", turn))
        odd = b.compare("ne", b.bin("and", quadrant, b.const("i32", 1)), b.const("i32", 0))
        sign = b.bin("shl", b.bin("and", quadrant, b.const("i32", 2)), b.const("i32", 30))
        y = unbits(b, b.bin("xor", bits(b, b.select(odd, c, s)), sign))
        if name == "sin":
            y = b.select(b.compare("oeq", x, b.like(x, 0.0)), x, y)  # keeps the sign of zero
        far = b.compare("ogt", b.call("fabs", x), b.like(x, TRIG_LIMIT))
        return b.rarely(far, lambda: b.each_lane(name + "f", x), y)

    return lower


sin, cos = _trig("sin", 0), _trig("cos", 1)


def rsqrt(b: Code, x: V) -> V:
    return b.fdiv(b.like(x, 1.0), b.call("sqrt", x))


FLOAT32: dict[str, Callable[[Code, V], V]] = {
    "exp": exp, "exp2": exp2, "expm1": expm1, "log": log, "log2": log2, "log10": log10, "log1p": log1p,
    "sigmoid": sigmoid, "tanh": tanh, "erf": erf, "sin": sin, "cos": cos, "rsqrt": rsqrt,
}  # fmt: skip
