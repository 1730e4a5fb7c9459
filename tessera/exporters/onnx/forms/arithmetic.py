"""Arithmetic of two operands. They get the dtype of the result first, as PyTorch promotes them."""

from __future__ import annotations

import math

import torch

from tessera.exporters.onnx.forms.common import as_ref, need
from tessera.exporters.onnx.forms.elementwise import NARROW, convert
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import form


def arithmetic(g: Graph, kind: str, a: object, b: object, dtype: torch.dtype | None = None) -> Ref:
    """`kind` over operands in the dtype of the result; narrow integers by way of wider ones."""
    dtype = dtype or g.result.dtype
    need(not dtype.is_complex)
    wide = torch.int32 if dtype in NARROW else dtype
    return convert(g, g.op(kind, as_ref(g, a, wide), as_ref(g, b, wide), dtype=wide), dtype)


def _scaled(g: Graph, x: object, alpha: object, dtype: torch.dtype) -> object:
    if alpha == 1:
        return x
    wide = torch.int32 if dtype in NARROW else dtype
    return g.op("Mul", as_ref(g, x, wide), g.scalar(alpha, wide), dtype=wide)


@form("add")
def add(g: Graph, a: object, b: object, alpha: object = 1) -> Ref:
    dtype = g.result.dtype
    need(not dtype.is_complex)
    if dtype == torch.bool:
        return g.op("Or", as_ref(g, a, dtype), as_ref(g, b, dtype))
    return arithmetic(g, "Add", a, _scaled(g, b, alpha, dtype))


@form("sub")
def sub(g: Graph, a: object, b: object, alpha: object = 1) -> Ref:
    need(not g.result.dtype.is_complex)
    return arithmetic(g, "Sub", a, _scaled(g, b, alpha, g.result.dtype))


@form("rsub")
def rsub(g: Graph, a: object, b: object, alpha: object = 1) -> Ref:
    need(not g.result.dtype.is_complex)
    return arithmetic(g, "Sub", b, _scaled(g, a, alpha, g.result.dtype))


@form("mul")
def mul(g: Graph, a: object, b: object) -> Ref:
    if g.result.dtype == torch.bool:
        return g.op("And", as_ref(g, a, torch.bool), as_ref(g, b, torch.bool))
    return arithmetic(g, "Mul", a, b)


@form("div true_divide divide")
def div(g: Graph, a: object, b: object, rounding_mode: str | None = None) -> Ref:
    dtype = g.result.dtype
    need(not dtype.is_complex)
    if rounding_mode == "floor":
        return floor_divide(g, a, b)
    if rounding_mode == "trunc":
        out = arithmetic(g, "Div", a, b)
        return truncated(g, out) if dtype.is_floating_point else out
    return arithmetic(g, "Div", a, b)


def truncated(g: Graph, x: Ref) -> Ref:
    """Towards zero; keeps the sign of what becomes zero."""
    return g.op("Mul", g.op("Floor", g.op("Abs", x)), g.op("Sign", x))


@form("trunc fix")
def trunc(g: Graph, x: Ref) -> Ref:
    return truncated(g, x) if x.is_float else x


@form("frac")
def frac(g: Graph, x: Ref) -> Ref:
    return g.op("Sub", x, truncated(g, x))


@form("floor_divide")
def floor_divide(g: Graph, a: object, b: object) -> Ref:
    """As Python has it: what the remainder leaves, divided, and rounded since it is not exact."""
    dtype = g.result.dtype
    need(not dtype.is_complex)
    wide = torch.int32 if dtype in NARROW else dtype
    top, bottom = as_ref(g, a, wide), as_ref(g, b, wide)
    if wide.is_floating_point:
        return g.op("Floor", g.op("Div", top, bottom))
    rest = g.op("Mod", top, bottom)
    return convert(g, g.op("Div", g.op("Sub", top, rest), bottom), dtype)


@form("remainder")
def remainder(g: Graph, a: object, b: object) -> Ref:
    """With the sign of the divisor."""
    dtype = g.result.dtype
    wide = torch.int32 if dtype in NARROW else dtype
    top, bottom = as_ref(g, a, wide), as_ref(g, b, wide)
    if not wide.is_floating_point:
        return convert(g, g.op("Mod", top, bottom, dtype=wide), dtype)
    rest = g.op("Mod", top, bottom, fmod=1, dtype=wide)
    other = g.op("Less", g.op("Mul", g.op("Sign", rest), g.op("Sign", bottom)), g.full(0, wide), dtype=torch.bool)
    return g.op("Where", other, g.op("Add", rest, bottom), rest, dtype=wide)


@form("fmod")
def fmod(g: Graph, a: object, b: object) -> Ref:
    dtype = g.result.dtype
    wide = torch.int32 if dtype in NARROW else dtype
    return convert(g, g.op("Mod", as_ref(g, a, wide), as_ref(g, b, wide), fmod=1, dtype=wide), dtype)


@form("pow")
def power(g: Graph, a: object, b: object) -> Ref:
    dtype = g.result.dtype
    need(not dtype.is_complex)
    if isinstance(a, Ref) and a.dtype == dtype and dtype.is_floating_point:
        if b == 2:
            return g.op("Mul", a, a)
        if b == 0.5:
            return g.op("Sqrt", a)
        if b == -0.5:
            return g.op("Reciprocal", g.op("Sqrt", a))
        if b == 1:
            return a
    if not dtype.is_floating_point and isinstance(b, Ref):
        return whole_power(g, as_ref(g, a, torch.int64), g.cast(b, torch.int64))
    return arithmetic(g, "Pow", a, b)


def whole_power(g: Graph, a: Ref, b: Ref) -> Ref:
    """To a negative power a whole number is zero, unless it is one or minus one."""
    out = g.op("Pow", a, g.op("Abs", b))
    small = g.op("Less", b, g.full(0, torch.int64), dtype=torch.bool)
    other = g.op("Not", g.op("Equal", g.op("Abs", a), g.full(1, torch.int64), dtype=torch.bool))
    return g.op("Where", g.op("And", small, other), g.full(0, torch.int64), out, dtype=torch.int64)


@form("square")
def square(g: Graph, x: Ref) -> Ref:
    return arithmetic(g, "Mul", x, x)


@form("maximum max.other")
def maximum(g: Graph, a: object, b: object) -> Ref:
    return extreme(g, "Max", "Or", a, b)


@form("minimum min.other")
def minimum(g: Graph, a: object, b: object) -> Ref:
    return extreme(g, "Min", "And", a, b)


def extreme(g: Graph, kind: str, logical: str, a: object, b: object) -> Ref:
    dtype = g.result.dtype
    if dtype == torch.bool:
        return g.op(logical, as_ref(g, a, dtype), as_ref(g, b, dtype))
    return arithmetic(g, kind, a, b)


@form("fmax")
def fmax(g: Graph, a: Ref, b: Ref) -> Ref:
    return without_nan(g, "Max", "Or", a, b)


@form("fmin")
def fmin(g: Graph, a: Ref, b: Ref) -> Ref:
    return without_nan(g, "Min", "And", a, b)


def without_nan(g: Graph, kind: str, logical: str, a: Ref, b: Ref) -> Ref:
    """What is not a number loses to what is one."""
    dtype = g.result.dtype
    if not dtype.is_floating_point:
        return extreme(g, kind, logical, a, b)
    a, b = g.cast(a, dtype), g.cast(b, dtype)
    first = g.op("Where", g.op("IsNaN", a, dtype=torch.bool), b, a, dtype=dtype)
    second = g.op("Where", g.op("IsNaN", b, dtype=torch.bool), a, b, dtype=dtype)
    return g.op(kind, first, second)


@form("atan2 arctan2")
def atan2(g: Graph, y: Ref, x: Ref) -> Ref:
    """The angle of (x, y), by the quadrant."""
    dtype = g.result.dtype
    y, x = g.cast(y, dtype), g.cast(x, dtype)
    zero, pi = g.full(0, dtype), g.full(math.pi, dtype)
    base = g.op("Atan", g.op("Div", y, x))
    back = g.op("Less", x, zero, dtype=torch.bool)
    below = g.op("Less", y, zero, dtype=torch.bool)
    turned = g.op("Where", below, g.op("Sub", base, pi), g.op("Add", base, pi), dtype=dtype)
    angle = g.op("Where", back, turned, base, dtype=dtype)
    origin = g.op("And", g.op("Equal", x, zero, dtype=torch.bool), g.op("Equal", y, zero, dtype=torch.bool))
    return g.op("Where", origin, zero, angle, dtype=dtype)


@form("addcmul")
def addcmul(g: Graph, x: Ref, a: Ref, b: Ref, value: object = 1) -> Ref:
    dtype = g.result.dtype
    product = arithmetic(g, "Mul", a, b)
    return arithmetic(g, "Add", x, _scaled(g, product, value, dtype))


@form("addcdiv")
def addcdiv(g: Graph, x: Ref, a: Ref, b: Ref, value: object = 1) -> Ref:
    dtype = g.result.dtype
    need(dtype.is_floating_point)
    return arithmetic(g, "Add", x, _scaled(g, arithmetic(g, "Div", a, b), value, dtype))


@form("hypot prims.hypot")
def hypot(g: Graph, a: Ref, b: Ref) -> Ref:
    """Of the larger one, so that no square overflows."""
    dtype = g.result.dtype
    a, b = (g.op("Abs", g.cast(x, dtype)) for x in (a, b))
    top, low = g.op("Max", a, b), g.op("Min", a, b)
    zero = g.full(0, dtype)
    ratio = g.op(
        "Div", low, g.op("Where", g.op("Equal", top, zero, dtype=torch.bool), g.full(1, dtype), top, dtype=dtype)
    )
    return g.op("Mul", top, g.op("Sqrt", g.op("Add", g.op("Mul", ratio, ratio), g.full(1, dtype))))
