"""Arithmetic, element by element. Operands get the dtype of the result first, as PyTorch promotes them."""

from __future__ import annotations

import math

import torch

from tessera.exporters.onnx.forms.common import as_ref, need, promoted
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import Form, form

_UNARY = {
    "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "ceil": "Ceil", "floor": "Floor", "sin": "Sin",
    "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh",
    "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "erf": "Erf", "sigmoid": "Sigmoid", "tanh": "Tanh",
    "reciprocal": "Reciprocal", "sign": "Sign", "neg": "Neg", "round.default": "Round",
    "special_expit": "Sigmoid", "special_erf": "Erf",
}  # fmt: skip
_ON_FLOATS = {"Ceil", "Floor", "Round"}  # whole numbers stay as they are
_NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16)  # runtimes have no arithmetic of these


def _unary(kind: str) -> Form:
    def write(g: Graph, x: Ref) -> Ref:
        if kind in _ON_FLOATS and not x.is_float:
            return x
        need(not g.result.dtype.is_complex)
        return g.op(kind, g.cast(x, g.result.dtype))

    return write


for _name, _kind in _UNARY.items():
    form(_name)(_unary(_kind))


@form("alias detach clone contiguous lift_fresh lift_fresh_copy lift alias_copy detach_copy positive resolve_conj")
@form("resolve_neg conj_physical conj _conj _conj_physical dropout feature_dropout alpha_dropout feature_alpha_dropout")
def identity(g: Graph, x: Ref, *_: object, **__: object) -> Ref:
    need(not x.dtype.is_complex)
    return x


@form("_to_copy to.dtype to.device to.other to.dtype_layout type_as _autocast_to_full_precision")
def to(g: Graph, x: Ref, *_: object, **__: object) -> Ref:
    need(not x.dtype.is_complex)
    return convert(g, x, g.result.dtype)


def convert(g: Graph, x: Ref, dtype: torch.dtype) -> Ref:
    """A cast as PyTorch does it: what is not zero is true."""
    if dtype == torch.bool and x.dtype != torch.bool:
        return g.op("Not", g.op("Equal", x, g.full(0, x.dtype), dtype=torch.bool))
    return g.cast(x, dtype)


# --- two operands ---


def arithmetic(g: Graph, kind: str, a: object, b: object, dtype: torch.dtype | None = None) -> Ref:
    """`kind` over operands in the dtype of the result; narrow integers by way of wider ones."""
    dtype = dtype or g.result.dtype
    need(not dtype.is_complex)
    wide = torch.int32 if dtype in _NARROW else dtype
    return convert(g, g.op(kind, as_ref(g, a, wide), as_ref(g, b, wide), dtype=wide), dtype)


def _scaled(g: Graph, x: object, alpha: object, dtype: torch.dtype) -> object:
    if alpha == 1:
        return x
    wide = torch.int32 if dtype in _NARROW else dtype
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
    wide = torch.int32 if dtype in _NARROW else dtype
    top, bottom = as_ref(g, a, wide), as_ref(g, b, wide)
    if wide.is_floating_point:
        return g.op("Floor", g.op("Div", top, bottom))
    rest = g.op("Mod", top, bottom)
    return convert(g, g.op("Div", g.op("Sub", top, rest), bottom), dtype)


@form("remainder")
def remainder(g: Graph, a: object, b: object) -> Ref:
    """With the sign of the divisor."""
    dtype = g.result.dtype
    wide = torch.int32 if dtype in _NARROW else dtype
    top, bottom = as_ref(g, a, wide), as_ref(g, b, wide)
    if not wide.is_floating_point:
        return convert(g, g.op("Mod", top, bottom, dtype=wide), dtype)
    rest = g.op("Mod", top, bottom, fmod=1, dtype=wide)
    other = g.op("Less", g.op("Mul", g.op("Sign", rest), g.op("Sign", bottom)), g.full(0, wide), dtype=torch.bool)
    return g.op("Where", other, g.op("Add", rest, bottom), rest, dtype=wide)


@form("fmod")
def fmod(g: Graph, a: object, b: object) -> Ref:
    dtype = g.result.dtype
    wide = torch.int32 if dtype in _NARROW else dtype
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
    return arithmetic(g, "Pow", a, b)


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


# --- precise forms of what ONNX lacks ---


@form("rsqrt")
def rsqrt(g: Graph, x: Ref) -> Ref:
    return g.op("Reciprocal", g.op("Sqrt", g.cast(x, g.result.dtype)))


@form("expm1 special_expm1")
def expm1(g: Graph, x: Ref) -> Ref:
    """tanh(x / 2) (exp(x) + 1), exact where exp(x) is near 1."""
    dtype = g.result.dtype
    x = g.cast(x, dtype)
    return g.op("Mul", g.op("Tanh", g.op("Mul", x, g.full(0.5, dtype))), g.op("Add", g.op("Exp", x), g.full(1, dtype)))


@form("log1p special_log1p")
def log1p(g: Graph, x: Ref) -> Ref:
    """2 atanh(x / (x + 2)) near zero, exact where 1 + x is near 1."""
    dtype = g.result.dtype
    need(not dtype.is_complex)
    x = g.cast(x, dtype)
    small = g.op("Less", g.op("Abs", x), g.full(0.5, dtype), dtype=torch.bool)
    held = g.op("Where", small, x, g.full(0, dtype), dtype=dtype)
    near = g.op("Mul", g.op("Atanh", g.op("Div", held, g.op("Add", held, g.full(2, dtype)))), g.full(2, dtype))
    return g.op("Where", small, near, g.op("Log", g.op("Add", x, g.full(1, dtype))), dtype=dtype)


@form("exp2 special_exp2")
def exp2(g: Graph, x: Ref) -> Ref:
    return g.op("Pow", g.full(2, g.result.dtype), g.cast(x, g.result.dtype))


def _log_base(base: float) -> Form:
    def write(g: Graph, x: Ref) -> Ref:
        dtype = g.result.dtype
        need(not dtype.is_complex)
        return g.op("Div", g.op("Log", g.cast(x, dtype)), g.full(math.log(base), dtype))

    return write


form("log2")(_log_base(2))
form("log10")(_log_base(10))


@form("erfc special_erfc")
def erfc(g: Graph, x: Ref) -> Ref:
    dtype = g.result.dtype
    return g.op("Sub", g.full(1, dtype), g.op("Erf", g.cast(x, dtype)))


@form("sgn")
def sgn(g: Graph, x: Ref) -> Ref:
    need(not x.dtype.is_complex and x.dtype != torch.bool)
    return g.op("Sign", x)


@form("round.decimals")
def round_decimals(g: Graph, x: Ref, decimals: int = 0) -> Ref:
    if not x.is_float:
        need(decimals >= 0)
        return x
    if decimals == 0:
        return g.op("Round", x)
    scale = g.full(10.0 ** abs(decimals), x.dtype)
    up, down = ("Mul", "Div") if decimals > 0 else ("Div", "Mul")
    return g.op(down, g.op("Round", g.op(up, x, scale)), scale)


# --- comparison and logic ---

_COMPARE = {"eq": "Equal", "lt": "Less", "gt": "Greater", "le": "LessOrEqual", "ge": "GreaterOrEqual"}


def compare(g: Graph, kind: str, a: object, b: object) -> Ref:
    dtype = promoted(a, b)
    need(not dtype.is_complex)
    wide = dtype if dtype.is_floating_point or dtype in (torch.int32, torch.int64) else torch.int32
    if kind == "Equal" and dtype == torch.bool:
        wide = dtype
    return g.op(kind, as_ref(g, a, wide), as_ref(g, b, wide), dtype=torch.bool)


def _compared(kind: str) -> Form:
    return lambda g, a, b: compare(g, kind, a, b)


for _name, _kind in _COMPARE.items():
    form(_name)(_compared(_kind))


@form("ne")
def ne(g: Graph, a: object, b: object) -> Ref:
    return g.op("Not", compare(g, "Equal", a, b))


def _logical(kind: str) -> Form:
    def write(g: Graph, a: Ref, b: Ref) -> Ref:
        need(not a.dtype.is_complex and not b.dtype.is_complex)
        return g.op(kind, convert(g, a, torch.bool), convert(g, b, torch.bool), dtype=torch.bool)

    return write


for _name in ("and", "or", "xor"):
    form(f"logical_{_name}")(_logical(_name.capitalize()))


@form("logical_not")
def logical_not(g: Graph, x: Ref) -> Ref:
    need(not x.dtype.is_complex)
    return g.op("Not", convert(g, x, torch.bool))


def _bitwise(logical: str, kind: str) -> Form:
    def write(g: Graph, a: object, b: object) -> Ref:
        dtype = g.result.dtype
        need(dtype == torch.bool or g.opset >= 18)
        return g.op(logical if dtype == torch.bool else kind, as_ref(g, a, dtype), as_ref(g, b, dtype), dtype=dtype)

    return write


for _name in ("and", "or", "xor"):
    form(f"bitwise_{_name} __{_name}__")(_bitwise(_name.capitalize(), f"Bitwise{_name.capitalize()}"))


@form("bitwise_not")
def bitwise_not(g: Graph, x: Ref) -> Ref:
    need(x.dtype == torch.bool or g.opset >= 18)
    return g.op("Not" if x.dtype == torch.bool else "BitwiseNot", x)


def _shift(direction: str) -> Form:
    def write(g: Graph, a: object, b: object) -> Ref:
        """ONNX shifts unsigned numbers alone; a signed one is multiplied, or divided as Python does."""
        dtype = g.result.dtype
        need(not dtype.is_floating_point)
        factor = g.cast(g.op("Pow", g.full(2.0, torch.float64), as_ref(g, b, torch.float64)), torch.int64)
        x = as_ref(g, a, torch.int64)
        if direction == "left":
            return g.op("Mul", x, factor)
        return g.op("Div", g.op("Sub", x, g.op("Mod", x, factor)), factor)

    return write


form("bitwise_left_shift __lshift__")(_shift("left"))
form("bitwise_right_shift __rshift__")(_shift("right"))


@form("isnan")
def isnan(g: Graph, x: Ref) -> Ref:
    need(not x.dtype.is_complex)
    return g.op("IsNaN", g.cast(x, x.dtype if x.is_float else torch.float32), dtype=torch.bool)


@form("isinf")
def isinf(g: Graph, x: Ref) -> Ref:
    need(not x.dtype.is_complex)
    return g.op("IsInf", g.cast(x, x.dtype if x.is_float else torch.float32), dtype=torch.bool)


@form("isposinf")
def isposinf(g: Graph, x: Ref) -> Ref:
    return g.op("IsInf", g.cast(x, x.dtype if x.is_float else torch.float32), detect_negative=0, dtype=torch.bool)


@form("isneginf")
def isneginf(g: Graph, x: Ref) -> Ref:
    return g.op("IsInf", g.cast(x, x.dtype if x.is_float else torch.float32), detect_positive=0, dtype=torch.bool)


@form("isfinite")
def isfinite(g: Graph, x: Ref) -> Ref:
    need(not x.dtype.is_complex)
    wide = g.cast(x, x.dtype if x.is_float else torch.float32)
    return g.op("Not", g.op("Or", g.op("IsNaN", wide, dtype=torch.bool), g.op("IsInf", wide, dtype=torch.bool)))


# --- choosing ---


@form("where")
def where(g: Graph, test: Ref, a: object = None, b: object = None) -> Ref:
    need(a is not None and not g.result.dtype.is_complex)
    dtype = g.result.dtype
    return g.op("Where", convert(g, test, torch.bool), as_ref(g, a, dtype), as_ref(g, b, dtype), dtype=dtype)


@form("masked_fill")
def masked_fill(g: Graph, x: Ref, mask: Ref, value: object) -> Ref:
    dtype = g.result.dtype
    need(not dtype.is_complex)
    return g.op("Where", mask, as_ref(g, value, dtype), g.cast(x, dtype), dtype=dtype)


@form("clamp clip")
def clamp(g: Graph, x: Ref, low: object = None, high: object = None) -> Ref:
    """Not Clip: where the bounds cross, PyTorch gives the upper one, and bounds may be tensors."""
    dtype = g.result.dtype
    out = g.cast(x, torch.int32 if dtype in _NARROW else dtype)
    for kind, bound in (("Max", low), ("Min", high)):
        if bound is not None:
            out = g.op(kind, out, as_ref(g, bound, out.dtype))
    return g.cast(out, dtype)


@form("clamp_min")
def clamp_min(g: Graph, x: Ref, low: object) -> Ref:
    return clamp(g, x, low)


@form("clamp_max")
def clamp_max(g: Graph, x: Ref, high: object) -> Ref:
    return clamp(g, x, None, high)


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


@form("prims.convert_element_type")
def convert_element_type(g: Graph, x: Ref, dtype: torch.dtype) -> Ref:
    need(not x.dtype.is_complex)
    return convert(g, x, dtype)
