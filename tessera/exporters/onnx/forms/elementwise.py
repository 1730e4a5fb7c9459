"""Functions of one tensor, element by element, and casts."""

from __future__ import annotations

import math

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import Form, form

_UNARY = {
    "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "ceil": "Ceil", "floor": "Floor", "sin": "Sin",
    "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh",
    "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "erf": "Erf", "sigmoid": "Sigmoid", "tanh": "Tanh",
    "reciprocal": "Reciprocal", "neg": "Neg", "round.default": "Round",
    "special_expit": "Sigmoid", "special_erf": "Erf",
}  # fmt: skip
_ON_FLOATS = {"Ceil", "Floor", "Round"}  # whole numbers stay as they are
NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16)  # runtimes have no arithmetic of these


def _unary(kind: str) -> Form:
    def write(g: Graph, x: Ref) -> Ref:
        if kind in _ON_FLOATS and not x.is_float:
            return x
        need(not g.result.dtype.is_complex)
        if kind in ("Neg", "Abs") and x.dtype == torch.uint8:
            return x if kind == "Abs" else g.cast(g.op(kind, g.cast(x, torch.int32)), x.dtype)
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


@form("prims.convert_element_type")
def convert_element_type(g: Graph, x: Ref, dtype: torch.dtype) -> Ref:
    need(not x.dtype.is_complex)
    return convert(g, x, dtype)


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


# log(erfcx(x) / t) is a polynomial of t = 1 / (1 + x / 2), within 1.2e-7, for x that are not negative.
_ERFCX = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip


def scaled_tail(g: Graph, x: Ref) -> Ref:
    """exp(x²) erfc(x) of what is not negative."""
    dtype = x.dtype
    need(dtype in (torch.float16, torch.bfloat16, torch.float32))
    t = g.op("Reciprocal", g.op("Add", g.op("Mul", x, g.full(0.5, dtype)), g.full(1, dtype)))
    total = g.full(_ERFCX[0], dtype)
    for c in _ERFCX[1:]:
        total = g.op("Add", g.op("Mul", total, t), g.full(c, dtype))
    return g.op("Mul", t, g.op("Exp", total))


@form("special_erfcx prims.erfcx")
def erfcx(g: Graph, x: Ref) -> Ref:
    x = g.cast(x, g.result.dtype)
    tail = scaled_tail(g, g.op("Abs", x))
    rest = g.op("Sub", g.op("Mul", g.full(2, x.dtype), g.op("Exp", g.op("Mul", x, x))), tail)
    return g.op("Where", g.op("Less", x, g.full(0, x.dtype), dtype=torch.bool), rest, tail, dtype=x.dtype)


@form("erfc special_erfc")
def erfc(g: Graph, x: Ref) -> Ref:
    """1 - erf(x) has no digits left where x is large: that end is computed by itself."""
    x = g.cast(x, g.result.dtype)
    near = g.op("Sub", g.full(1, x.dtype), g.op("Erf", x))
    if x.dtype == torch.float64:
        return near
    far = g.op("Mul", scaled_tail(g, g.op("Abs", x)), g.op("Exp", g.op("Neg", g.op("Mul", x, x))))
    return g.op("Where", g.op("Greater", x, g.full(1, x.dtype), dtype=torch.bool), far, near, dtype=x.dtype)


@form("sign sgn")
def sign(g: Graph, x: Ref) -> Ref:
    """Of NaN it is 0, where ONNX says nothing and runtimes give NaN."""
    need(not x.dtype.is_complex)
    if x.dtype == torch.bool:
        return x
    known = g.op("Sign", x)
    return g.op("Where", g.op("IsNaN", x, dtype=torch.bool), g.full(0, x.dtype), known) if x.is_float else known


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


@form("angle")
def angle(g: Graph, x: Ref) -> Ref:
    need(x.is_float)
    zero = g.full(0, x.dtype)
    turned = g.op("Where", g.op("Less", x, zero, dtype=torch.bool), g.full(math.pi, x.dtype), zero, dtype=x.dtype)
    return g.op("Where", g.op("IsNaN", x, dtype=torch.bool), x, turned, dtype=x.dtype)
