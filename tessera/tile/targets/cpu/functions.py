"""`tile.apply` on the CPU: one entry a function, by the kind of its arguments.

An entry takes the code and the arguments as scalars or vectors of one element type. Integer division by zero,
which has no meaning, gives some number and never a trap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.tile.targets.cpu.code import V, number
from tessera.tile.targets.cpu.elements import F32, Element, cast, narrow, truth, widen
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.tile.targets.cpu.math import FLOAT32
from tessera.tile.targets.cpu.math64 import FLOAT64, pow32
from tessera.util.errors import OptionError

Lower = Callable[..., V]

LIBRARY = ["asin", "acos", "atan", "atan2", "sinh", "cosh", "tan", "erfc"]


def apply(b: Code, fn: str, args: Sequence[V], elements: Sequence[Element], to: Element) -> V:
    """The value of `fn`, in the element type `to`."""
    args, elements = list(args), list(elements)
    if fn == "select":
        c = truth(b, args[0], elements[0])
        return b.select(c, *(cast(b, a, e, to) for a, e in zip(args[1:], elements[1:], strict=True)))
    if fn.startswith("logical_"):
        return LOGIC[fn](b, *(truth(b, a, e) for a, e in zip(args, elements, strict=True)))
    if elements[0].short:  # the arithmetic of float32, rounded back
        args = [widen(b, a, e) if e.short else a for a, e in zip(args, elements, strict=True)]
        result = apply(b, fn, args, [F32 if e.short else e for e in elements], F32 if to.short else to)
        return narrow(b, result, to) if to.short else result
    e = elements[0]
    args = [cast(b, a, x, e) for a, x in zip(args, elements, strict=True)]
    if fn in COMPARE:
        how = COMPARE[fn]
        return b.compare(how.floats if e.is_float else how.unsigned if e.unsigned else how.signed, *args)
    table = FLOAT if e.is_float else BOOL if e.name == "i1" else INTEGER
    if fn not in table:
        raise OptionError(f"expected a function of {e.name} that the cpu target knows, got {fn!r}")
    return table[fn](b, *args, e) if table is INTEGER else table[fn](b, *args)


# --- comparisons and logic ---


@dataclass(frozen=True)
class Compare:
    floats: str
    signed: str
    unsigned: str


COMPARE = {
    "eq": Compare("oeq", "eq", "eq"),
    "ne": Compare("une", "ne", "ne"),
    "lt": Compare("olt", "slt", "ult"),
    "le": Compare("ole", "sle", "ule"),
    "gt": Compare("ogt", "sgt", "ugt"),
    "ge": Compare("oge", "sge", "uge"),
}


def _instruction(op: str) -> Lower:
    return lambda b, x, y, *_: b.bin(op, x, y)


def _intrinsic(name: str) -> Lower:
    return lambda b, *xs: b.call(name, *xs)


def _not(b: Code, x: V, *_: Element) -> V:
    return b.bin("xor", x, b.like(x, -1 if x.elem != "i1" else 1))


LOGIC: dict[str, Lower] = {
    "logical_and": _instruction("and"),
    "logical_or": _instruction("or"),
    "logical_xor": _instruction("xor"),
    "logical_not": _not,
}

# Truth values: sums and products are or and and, as PyTorch has them.
BOOL: dict[str, Lower] = {
    "add": _instruction("or"),
    "mul": _instruction("and"),
    "maximum": _instruction("or"),
    "minimum": _instruction("and"),
    "fmax": _instruction("or"),
    "fmin": _instruction("and"),
    "bit_and": _instruction("and"),
    "bit_or": _instruction("or"),
    "bit_xor": _instruction("xor"),
    "bit_not": _not,
    "isnan": lambda b, x: b.like(x, 0),
    "isinf": lambda b, x: b.like(x, 0),
    "abs": lambda b, x: x,
    "sign": lambda b, x: x,
}

# --- floats ---


def _divide(b: Code, x: V, y: V) -> V:
    """x / y; where one y serves many lanes, by its reciprocal, which is within 1.5 units in the last place.

    A factor, one unless y is very small or large, keeps the reciprocal a normal number.
    """
    if y.lanes or not x.lanes or y.literal:
        return b.fdiv(x, y)
    small, large = (2.0**-100, 2.0**100) if x.elem == "float" else (2.0**-1000, 2.0**1000)
    size = b.call("fabs", y)
    factor = b.select(b.compare("olt", size, b.like(y, small)), b.like(y, large * 2.0**-20), b.like(y, 1.0))
    factor = b.select(b.compare("ogt", size, b.like(y, large)), b.like(y, small * 2.0**20), factor)
    inverse = b.fdiv(b.like(y, 1.0), b.fmul(y, factor))
    return b.fmul(b.fmul(x, factor), inverse)


def _wins(how: str) -> Lower:
    """maximum and minimum: NaN wins."""

    def lower(b: Code, x: V, y: V) -> V:
        if b.host.arm:
            return b.call("maximum" if how == "ogt" else "minimum", x, y)
        x, y = b.match(x, y)
        best = b.select(b.compare(how, x, y), x, y)  # y if either is NaN
        return b.select(b.compare("uno", x, x), x, best)

    return lower


def _sign(b: Code, x: V) -> V:
    up = b.select(b.compare("ogt", x, b.like(x, 0.0)), b.like(x, 1.0), b.like(x, 0.0))
    return b.select(b.compare("olt", x, b.like(x, 0.0)), b.like(x, -1.0), up)


def _remainder(b: Code, x: V, y: V) -> V:
    """With the sign of y."""
    r = _fmod(b, x, y)
    zero = b.like(r, 0.0)
    differs = b.bin("xor", b.compare("olt", r, zero), b.compare("olt", *b.match(y, zero)))
    return b.select(b.bin("and", differs, b.compare("une", r, zero)), b.fadd(r, y), r)


def _fmod(b: Code, x: V, y: V) -> V:
    return b.each_lane("fmodf" if x.elem == "float" else "fmod", x, y)


def _floor_divide(b: Code, x: V, y: V) -> V:
    """As PyTorch rounds: by way of fmod, so that the quotient is right when x is a multiple of y."""
    x, y = b.match(x, y)
    zero = b.like(x, 0.0)
    r = _fmod(b, x, y)
    q = b.fdiv(b.fsub(x, r), y)
    differs = b.bin(
        "and", b.compare("une", r, zero), b.bin("xor", b.compare("olt", r, zero), b.compare("olt", y, zero))
    )
    q = b.select(differs, b.fsub(q, b.like(x, 1.0)), q)
    down = b.call("floor", q)
    down = b.select(b.compare("ogt", b.fsub(q, down), b.like(x, 0.5)), b.fadd(down, b.like(x, 1.0)), down)
    plain = b.fdiv(x, y)
    down = b.select(b.compare("oeq", q, zero), b.call("copysign", zero, plain), down)
    return b.select(b.compare("oeq", y, zero), plain, down)


def _power(b: Code, x: V, y: V) -> V:
    if y.literal and not y.lanes:
        square = {number(y.elem, k): k for k in (1, 2, 3)}
        match square.get(y.name):
            case 1:
                return x
            case 2:
                return b.fmul(x, x)
            case 3:
                return b.fmul(b.fmul(x, x), x)
    return pow32(b, x, y) if x.elem == "float" else b.each_lane("pow", x, y)


def _either(name: str) -> Lower:
    return lambda b, x: (FLOAT32 if x.elem == "float" else FLOAT64)[name](b, x)


def _library(name: str) -> Lower:
    return lambda b, *xs: b.each_lane(name + "f" if xs[0].elem == "float" else name, *xs)


FLOAT: dict[str, Lower] = {
    "add": _instruction("fadd"),
    "sub": _instruction("fsub"),
    "mul": _instruction("fmul"),
    "div": _divide,
    "floordiv": _floor_divide,
    "truncdiv": lambda b, x, y: b.call("trunc", b.fdiv(x, y)),
    "mod": _remainder,
    "fmod": _fmod,
    "neg": lambda b, x: b.fneg(x),
    "abs": _intrinsic("fabs"),
    "sign": _sign,
    "maximum": _wins("ogt"),
    "minimum": _wins("olt"),
    "fmax": _intrinsic("maxnum"),
    "fmin": _intrinsic("minnum"),
    "fma": lambda b, x, y, z: b.fma(*b.match(x, y, z)),
    "sqrt": _intrinsic("sqrt"),
    "reciprocal": lambda b, x: b.fdiv(b.like(x, 1.0), x),
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "trunc": _intrinsic("trunc"),
    "round": _intrinsic("rint"),
    "isnan": lambda b, x: b.compare("uno", x, x),
    "isinf": lambda b, x: b.compare("oeq", b.call("fabs", x), b.like(x, float("inf"))),
    "pow": _power,
    **{name: _either(name) for name in FLOAT32},
    **{name: _library(name) for name in LIBRARY},
}

# --- integers ---


def _safe(b: Code, x: V, y: V, e: Element) -> tuple[V, V, V]:
    """x, y with y made harmless where it is 0 (or -1, which may overflow), and where y is -1."""
    x, y = b.match(x, y)
    minus = b.compare("eq", y, b.like(y, -1)) if not e.unsigned else b.compare("ne", y, y)
    bad = b.bin("or", minus, b.compare("eq", y, b.like(y, 0)))
    return x, b.select(bad, b.like(y, 1), y), minus


def _truncated(b: Code, x: V, y: V, e: Element) -> V:
    x, y, minus = _safe(b, x, y, e)
    if e.unsigned:
        return b.bin("udiv", x, y)
    return b.select(minus, b.bin("sub", b.like(x, 0), x), b.bin("sdiv", x, y))


def _rest(b: Code, x: V, y: V, e: Element) -> V:
    x, y, _ = _safe(b, x, y, e)  # the remainder by -1 is the remainder by 1
    return b.bin("urem" if e.unsigned else "srem", x, y)


def _mod(b: Code, x: V, y: V, e: Element) -> V:
    r = _rest(b, x, y, e)
    if e.unsigned:
        return r
    zero = b.like(r, 0)
    differs = b.compare("slt", b.bin("xor", r, y), zero)
    return b.select(b.bin("and", differs, b.compare("ne", r, zero)), b.bin("add", r, y), r)


def _floored(b: Code, x: V, y: V, e: Element) -> V:
    q = _truncated(b, x, y, e)
    if e.unsigned:
        return q
    r = _rest(b, x, y, e)
    zero = b.like(r, 0)
    below = b.bin("and", b.compare("slt", b.bin("xor", *b.match(x, y)), zero), b.compare("ne", r, zero))
    return b.select(below, b.bin("sub", q, b.like(q, 1)), q)


def _shift(op: str) -> Lower:
    """Shifting by the width or more, or by less than nothing, leaves no bit of the number (its sign, to the right)."""

    def lower(b: Code, x: V, y: V, e: Element) -> V:
        x, y = b.match(x, y)
        bits = int(x.elem[1:])
        right = ("lshr" if e.unsigned else "ashr") if op == "right" else "shl"
        inside = b.compare("ult", y, b.like(y, bits))
        shifted = b.bin(right, x, b.select(inside, y, b.like(y, bits - 1)))
        if right == "ashr":
            return shifted
        return b.select(inside, shifted, b.like(x, 0))

    return lower


def _absolute(b: Code, x: V, e: Element) -> V:
    return x if e.unsigned else b.select(b.compare("slt", x, b.like(x, 0)), b.bin("sub", b.like(x, 0), x), x)


def _integer_sign(b: Code, x: V, e: Element) -> V:
    up = b.select(b.compare("ne", x, b.like(x, 0)), b.like(x, 1), b.like(x, 0))
    return up if e.unsigned else b.select(b.compare("slt", x, b.like(x, 0)), b.like(x, -1), up)


def _extreme(name: str) -> Lower:
    return lambda b, x, y, e: b.call(("u" if e.unsigned else "s") + name, x, y)


def _integer_power(b: Code, x: V, y: V, e: Element) -> V:
    """By squaring; a negative power is 0 unless the base is 1 or -1."""
    x, y = b.match(x, y)
    name = f"power.{x.elem}"
    b.helpers.setdefault(name, POWER.replace("TYPE", x.elem))
    if e.unsigned:
        raise OptionError("expected a signed integer for pow, got unsigned")
    return b.each_lane(name, x, y)


POWER = """define internal TYPE @power.TYPE(TYPE %x, TYPE %y) {
entry:
  %negative = icmp slt TYPE %y, 0
  %minus = sub TYPE 0, %y
  %size = select i1 %negative, TYPE %minus, TYPE %y
  br label %body
body:
  %n = phi TYPE [ %size, %entry ], [ %rest, %body ]
  %base = phi TYPE [ %x, %entry ], [ %square, %body ]
  %sum = phi TYPE [ 1, %entry ], [ %new, %body ]
  %bit = and TYPE %n, 1
  %odd = icmp ne TYPE %bit, 0
  %times = mul TYPE %sum, %base
  %new = select i1 %odd, TYPE %times, TYPE %sum
  %square = mul TYPE %base, %base
  %rest = lshr TYPE %n, 1
  %done = icmp eq TYPE %rest, 0
  br i1 %done, label %end, label %body
end:
  %one = icmp eq TYPE %x, 1
  %minusone = icmp eq TYPE %x, -1
  %unit = or i1 %one, %minusone
  %keep = select i1 %unit, TYPE %new, TYPE 0
  %result = select i1 %negative, TYPE %keep, TYPE %new
  ret TYPE %result
}"""

INTEGER: dict[str, Lower] = {
    "add": _instruction("add"),
    "sub": _instruction("sub"),
    "mul": _instruction("mul"),
    "floordiv": _floored,
    "truncdiv": _truncated,
    "mod": _mod,
    "fmod": _rest,
    "neg": lambda b, x, e: b.bin("sub", b.like(x, 0), x),
    "abs": _absolute,
    "sign": _integer_sign,
    "maximum": _extreme("max"),
    "minimum": _extreme("min"),
    "fmax": _extreme("max"),
    "fmin": _extreme("min"),
    "fma": lambda b, x, y, z, e: b.bin("add", b.bin("mul", x, y), z),
    "pow": _integer_power,
    "isnan": lambda b, x, e: V("zeroinitializer" if x.lanes else "false", "i1", x.lanes),
    "isinf": lambda b, x, e: V("zeroinitializer" if x.lanes else "false", "i1", x.lanes),
    "floor": lambda b, x, e: x,
    "ceil": lambda b, x, e: x,
    "trunc": lambda b, x, e: x,
    "round": lambda b, x, e: x,
    "bit_and": _instruction("and"),
    "bit_or": _instruction("or"),
    "bit_xor": _instruction("xor"),
    "bit_not": _not,
    "shl": _shift("left"),
    "shr": _shift("right"),
}
