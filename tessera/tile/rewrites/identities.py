"""Identities of the elementwise functions: the table that `canonicalise` applies to `tile.apply`.

An entry is a function name and what its arguments may become. Only what is exact for every argument, NaN,
infinities and signed zeros included, stands here: x + 0.0 is not x (-0.0 + 0.0 is 0.0), but x - 0.0 is. A rule that
makes an operation gives it the type of the one it replaces; one that finds a value may find one of another type,
and is then not applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from xdsl.dialects.builtin import AnyFloat, Float16Type, Float32Type, Float64Type, IntegerType, StringAttr
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.pattern_rewriter import PatternRewriter

from tessera.tile.dialect.ops import ApplyOp
from tessera.tile.dialect.types import element_of
from tessera.tile.rewrites.numbers import constant_op, is_constant, is_number, number_of


@dataclass(frozen=True)
class Site:
    """Where a rewrite happens: makes new operations before the one that goes."""

    op: ApplyOp
    rewriter: PatternRewriter

    def insert(self, op: Operation) -> SSAValue:
        self.rewriter.insert(op)
        return op.results[0]

    def apply(self, fn: str, *args: SSAValue) -> SSAValue:
        """Another function with the same result type."""
        properties = {"fn": StringAttr(fn)}
        return self.insert(ApplyOp(operands=[list(args)], properties=properties, result_types=[self.op.result.type]))

    def constant(self, number: bool | int | float, element: Attribute | None = None) -> SSAValue:
        return self.insert(constant_op(number, element or element_of(self.op.result)))


Rule = Callable[..., SSAValue | None]  # (site, *arguments) -> what to use instead


def is_float(v: SSAValue) -> bool:
    return isinstance(element_of(v), AnyFloat)


def is_whole(v: SSAValue) -> bool:
    """Integers other than truth values."""
    return isinstance(element_of(v), IntegerType) and element_of(v) != IntegerType(1)


def is_truth(v: SSAValue) -> bool:
    return element_of(v) == IntegerType(1)


def made_by(v: SSAValue, fn: str) -> ApplyOp | None:
    op = v.owner
    return op if isinstance(op, ApplyOp) and op.fn.data == fn else None


SMALLEST_EXPONENT = {Float16Type(): -14, Float32Type(): -126, Float64Type(): -1022}


def exact_reciprocal(v: SSAValue) -> float | None:
    """1/v where v is a power of two and neither it nor its reciprocal is subnormal: x / v is x * (1 / v)."""
    number = number_of(v)
    lowest = SMALLEST_EXPONENT.get(element_of(v))  # type: ignore[call-overload]
    if not isinstance(number, float) or lowest is None or number == 0 or not math.isfinite(number):
        return None
    mantissa, exponent = math.frexp(number)
    return 1 / number if abs(mantissa) == 0.5 and abs(exponent) < -lowest else None


# --- rules ---


def neutral(value: bool | int | float, when: Callable[[SSAValue], bool] = lambda _: True) -> Rule:
    """f(x, value) -> x"""
    return lambda site, a, b: a if when(a) and is_number(b, value) else None


def absorbing(value: bool | int, when: Callable[[SSAValue], bool]) -> Rule:
    """f(x, value) -> value"""
    return lambda site, a, b: b if when(a) and is_number(b, value) else None


def same(site: Site, a: SSAValue, b: SSAValue) -> SSAValue | None:
    """f(x, x) -> x"""
    return a if a is b else None


def twice_is_nothing(fn: str) -> Rule:
    """f(f(x)) -> x"""
    return lambda site, a: inner.args[0] if (inner := made_by(a, fn)) else None


def twice_is_once(fn: str) -> Rule:
    """f(f(x)) -> f(x)"""
    return lambda site, a: a if made_by(a, fn) else None


def swap_constant(fn: str) -> Rule:
    """f(constant, x) -> g(x, constant), so that constants stand on the right"""
    return lambda site, a, b: site.apply(fn, b, a) if is_constant(a) and not is_constant(b) else None


def of_negative(becomes: str) -> Rule:
    """f(x, -y) -> g(x, y)"""
    return lambda site, a, b: site.apply(becomes, a, n.args[0]) if (n := made_by(b, "neg")) else None


def mul_minus_one(site: Site, a: SSAValue, b: SSAValue) -> SSAValue | None:
    """x * -1 -> -x"""
    return site.apply("neg", a) if is_number(b, -1) and not is_truth(a) else None


def zero_times(site: Site, a: SSAValue, b: SSAValue) -> SSAValue | None:
    """x * 0 -> 0, of integers: a float may be infinite"""
    return b if is_whole(a) and is_number(b, 0) else None


def div_power_of_two(site: Site, a: SSAValue, b: SSAValue) -> SSAValue | None:
    """x / 2^k -> x * 2^-k"""
    factor = exact_reciprocal(b)
    return None if factor is None else site.apply("mul", a, site.constant(factor, element_of(b)))


def square(site: Site, a: SSAValue, b: SSAValue) -> SSAValue | None:
    """x ** 2 -> x * x"""
    return site.apply("mul", a, a) if is_number(b, 2) and a.type == site.op.result.type else None


def abs_of_neg(site: Site, a: SSAValue) -> SSAValue | None:
    """|-x| -> |x|"""
    return site.apply("abs", inner.args[0]) if (inner := made_by(a, "neg")) else None


def select_known(site: Site, c: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue | None:
    """select(true, a, b) -> a; select(false, a, b) -> b; select(c, a, a) -> a"""
    if a is b:
        return a
    known = number_of(c)
    return None if known is None else a if known else b


def select_not(site: Site, c: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue | None:
    """select(not c, a, b) -> select(c, b, a)"""
    inner = made_by(c, "logical_not")
    return site.apply("select", inner.args[0], b, a) if inner and is_truth(inner.args[0]) else None


def select_truth(site: Site, c: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue | None:
    """select(c, true, false) -> c; select(c, false, true) -> not c"""
    if not (is_truth(a) and is_truth(c)):
        return None
    if is_number(a, True) and is_number(b, False):
        return c
    return site.apply("logical_not", c) if is_number(a, False) and is_number(b, True) else None


# Not maximum and minimum: of 0.0 and -0.0, which one comes out depends on their order.
COMMUTATIVE = (
    "add", "mul", "eq", "ne",
    "bit_and", "bit_or", "bit_xor", "logical_and", "logical_or", "logical_xor",
)  # fmt: skip
IDEMPOTENT = ("maximum", "minimum", "fmax", "fmin", "bit_and", "bit_or", "logical_and", "logical_or")

TABLE: list[tuple[str, Rule]] = [
    *((fn, swap_constant(fn)) for fn in COMMUTATIVE),
    *((fn, swap_constant(g)) for fn, g in (("lt", "gt"), ("gt", "lt"), ("le", "ge"), ("ge", "le"))),
    ("add", neutral(0, is_whole)),  # x + 0 -> x
    ("add", neutral(-0.0, is_float)),  # x + -0.0 -> x
    ("sub", neutral(0)),  # x - 0 -> x
    ("mul", neutral(1)),  # x * 1 -> x
    ("div", neutral(1)),  # x / 1 -> x
    ("floordiv", neutral(1, is_whole)),
    ("truncdiv", neutral(1, is_whole)),
    ("pow", neutral(1)),  # x ** 1 -> x
    ("shl", neutral(0)),
    ("shr", neutral(0)),
    ("bit_or", neutral(0)),
    ("bit_xor", neutral(0)),
    ("bit_and", neutral(-1)),
    ("logical_and", neutral(True, is_truth)),
    ("logical_or", neutral(False, is_truth)),
    ("logical_xor", neutral(False, is_truth)),
    ("mul", zero_times),
    ("bit_and", absorbing(0, is_whole)),
    ("logical_and", absorbing(False, is_truth)),
    ("logical_or", absorbing(True, is_truth)),
    *((fn, same) for fn in IDEMPOTENT),
    *((fn, twice_is_nothing(fn)) for fn in ("neg", "bit_not", "logical_not")),
    *((fn, twice_is_once(fn)) for fn in ("abs", "sign", "floor", "ceil", "trunc", "round")),
    ("abs", abs_of_neg),
    ("add", of_negative("sub")),  # x + -y -> x - y
    ("sub", of_negative("add")),  # x - -y -> x + y
    ("mul", mul_minus_one),
    ("div", div_power_of_two),
    ("pow", square),
    ("select", select_known),
    ("select", select_truth),
    ("select", select_not),
]

RULES: dict[str, list[Rule]] = {}
for _fn, _rule in TABLE:
    RULES.setdefault(_fn, []).append(_rule)
