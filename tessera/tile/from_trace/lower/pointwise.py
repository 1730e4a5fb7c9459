"""Lowerings of pointwise operators: one formula per operator, over tile values.

Arguments are read at the result's index (broadcast dimensions at 0) and brought to the dtype in which PyTorch
computes: the result's own for arithmetic, the promoted one for comparisons. Numbers stay numbers; beside a value they
take its dtype. Half precision is computed in single and rounded where it is stored; a number that a comparison or a
remainder hangs on is rounded to it first, as PyTorch does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from tessera.ir.equation import Arg, Value
from tessera.tile.from_trace.index import ZERO, Indices, Unlowerable, size_index, sizes_of
from tessera.tile.from_trace.lower.rule import POINTWISE, Call, Reader, Rule, define
from tessera.tile.from_trace.values import HALF, NARROW, T, held, wide
from tessera.util.cost import flops_per_element
from tessera.util.names import names

EXPENSIVE = 8  # instructions an element


def broadcast(x: Value, at: Indices) -> Indices:
    """The index of an argument that PyTorch's broadcasting stretches to the result's shape."""
    own = at[len(at) - x.ndim :]
    one = sizes_of((1,))[0]
    return tuple(ZERO if size == one else i for i, size in zip(own, sizes_of(x.shape), strict=True))


def operands(
    reader: Reader, call: Call, at: Indices, dtype: torch.dtype | None, sharp: bool = False
) -> tuple[list, dict]:
    """A call's arguments in a dtype. `sharp`: numbers too, where that has 16 bits and arithmetic more."""

    def operand(a: Arg) -> object:
        if isinstance(a, Value):
            x = reader.read(a, broadcast(a, at))
            return x if dtype is None else x.to(dtype)
        if isinstance(a, torch.SymInt):  # a size as a number
            return reader.emit.iota(size_index(a)).to(dtype or torch.int64)
        return held(a, dtype) if sharp and dtype is not None and isinstance(a, (int, float)) else a

    return [operand(a) for a in call.args], {k: operand(v) for k, v in call.kwargs.items()}


def _number_dtype(x: bool | int | float | torch.SymInt) -> torch.dtype:
    if isinstance(x, float):
        return torch.get_default_dtype()
    return torch.bool if isinstance(x, bool) else torch.int64


def _join(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """What comes of two kinds of arguments: the lower one counts only where it is of a higher category."""
    if higher is None or lower is None:
        return higher or lower
    weak = higher is torch.bool or (lower.is_floating_point and not higher.is_floating_point)
    return torch.promote_types(higher, lower) if weak else higher


def promoted(args: Sequence[Arg]) -> torch.dtype:
    """PyTorch's promotion: tensors with dimensions before those without, and both before numbers."""
    whole = [a.dtype for a in args if isinstance(a, Value) and a.ndim]
    single = [a.dtype for a in args if isinstance(a, Value) and not a.ndim]
    numbers = [_number_dtype(a) for a in args if isinstance(a, (bool, int, float, torch.SymInt))]
    kinds = [functools.reduce(torch.promote_types, k) if k else None for k in (whole, single, numbers)]
    dtype = _join(kinds[0], _join(kinds[1], kinds[2]))
    assert dtype is not None
    return dtype


# --- families -----------------------------------------------------------------------------------------


def pointwise(
    texts: str,
    formula: Callable[..., T],
    expensive: bool = False,
    narrow: Callable[..., T] | None = None,
    sharp: bool = False,
    raises: Callable[[Call], str] | None = None,
) -> None:
    """Computed in the result's dtype; by `narrow`, if there is one, where that has 16 bits."""

    def lower(reader: Reader, call: Call, at: Indices) -> T:
        args, kwargs = operands(reader, call, at, call.out.dtype, sharp)
        chosen = narrow if narrow is not None and call.out.dtype in HALF else formula
        return chosen(*args, **kwargs).to(call.out.dtype)

    define(texts, Rule(POINTWISE, lower, expensive=expensive, raises=raises))


def predicate(texts: str, formula: Callable[..., T]) -> None:
    """Computed in the promoted dtype of the arguments; the result is a truth value."""

    def lower(reader: Reader, call: Call, at: Indices) -> T:
        dtype = promoted(call.args)
        args, kwargs = operands(reader, call, at, dtype, sharp=True)
        if dtype in HALF:  # a maximum that was stored is found again only among numbers rounded as it was
            args = [a.rounded(dtype) if isinstance(a, T) else a for a in args]
        return formula(*args, **kwargs)

    define(texts, Rule(POINTWISE, lower))


def raw(texts: str, formula: Callable[..., T]) -> None:
    """Arguments keep their dtypes; the formula gets the call too."""

    def lower(reader: Reader, call: Call, at: Indices) -> T:
        args, kwargs = operands(reader, call, at, None)
        return formula(call, *args, **kwargs).to(call.out.dtype)

    define(texts, Rule(POINTWISE, lower))


def is_expensive(function: str) -> bool:
    """A value of this function is written and read rather than computed twice."""
    return flops_per_element(function) >= EXPENSIVE


# --- functions of one value ---------------------------------------------------------------------------

for _name in names(
    "exp exp2 expm1 log log2 log10 log1p sigmoid tanh erf erfc sin cos tan asin acos atan sinh cosh"
    " sqrt rsqrt reciprocal neg sign"
):
    pointwise(_name, lambda x, fn=_name: x.fn(fn), is_expensive(_name))
pointwise("abs", lambda x: x if x.dtype is torch.bool else x.fn("abs"))
pointwise("sgn", lambda x: x.fn("sign"))
pointwise("square", lambda x: x * x)
pointwise("lift_fresh_copy", lambda x: x)
pointwise("frac", lambda x: x - x.fn("trunc"))


def _rounding(fn: str) -> Callable[[T], T]:
    return lambda x: x.fn(fn) if x.dtype.is_floating_point else x


for _name in ("floor", "ceil", "trunc", "round.default"):
    pointwise(_name, _rounding(_name.removesuffix(".default")))
pointwise("log_sigmoid logsigmoid", lambda x: x.fn("minimum", 0) - (-x.fn("abs")).fn("exp").fn("log1p"), expensive=True)


BEYOND = 464.0  # half a step over the largest number of f8E4M3FN


@functools.cache
def saturates(kind: str) -> bool:
    """PyTorch makes what is too large for f8E4M3FN its largest number, as kernels do; before 2.12 it gave NaN."""
    device = kind if kind != "cuda" or torch.cuda.is_available() else "cpu"
    return bool(torch.tensor(1e4, device=device).to(torch.float8_e4m3fn).float().isfinite())


def _copy(call: Call, x: T, *options: object, **more: object) -> T:
    """A cast where the result's dtype is another. One to 16 bits or 8 rounds, though arithmetic goes on in 32: the
    program asks for just that."""
    source, dtype = call.args[0], call.out.dtype
    assert isinstance(source, Value)
    if dtype is torch.float8_e4m3fn and not saturates(call.out.tensor.device.type):
        x = (x.fn("abs") > BEYOND).where(float("nan"), x)
    return x.rounded(dtype) if dtype in NARROW and source.dtype is not dtype else x


raw("clone contiguous _to_copy to.dtype to.device to.dtype_layout convert_element_type", _copy)

# --- arithmetic -----------------------------------------------------------------------------------------


def _scaled(b: T | float, alpha: float) -> T | float:
    return b if alpha == 1 and not isinstance(alpha, bool) else b * alpha


def flip(a: T | float, b: T | float) -> tuple[T, T | float]:
    """Some value to the left: `2 + x` and `where(c, 2, x)` start with a number."""
    if isinstance(a, T):
        return a, b
    assert isinstance(b, T)
    return b.like(a), b


def _div(a: T | float, b: T | float, rounding_mode: str | None = None) -> T:
    a, b = flip(a, b)
    if rounding_mode is None:
        return a / b
    return a.fn("floordiv" if rounding_mode == "floor" else "truncdiv", b)


def _by_zero(call: Call) -> str:
    whole = not call.out.dtype.is_floating_point
    unknown = not isinstance(call.args[1], (int, float)) or not call.args[1]
    return "PyTorch checks for a division of integers by zero, and a kernel cannot raise" if whole and unknown else ""


pointwise("add", lambda a, b, alpha=1: a + _scaled(b, alpha))
pointwise("sub subtract", lambda a, b, alpha=1: a - _scaled(b, alpha))
pointwise("rsub", lambda a, b, alpha=1: b - _scaled(a, alpha))
pointwise("mul multiply", lambda a, b: a * b)
pointwise("div divide true_divide", _div, raises=_by_zero)
pointwise("floor_divide", lambda a, b: flip(a, b)[0].fn("floordiv", b), raises=_by_zero)
pointwise("remainder", lambda a, b: flip(a, b)[0].fn("mod", b), sharp=True, raises=_by_zero)
pointwise("fmod", lambda a, b: a.fn("fmod", b), sharp=True, raises=_by_zero)
for _name in names("maximum minimum fmax fmin atan2"):
    pointwise(
        _name,
        lambda a, b, fn=_name: _extreme(a, b, fn) if a.dtype is torch.bool else a.fn(fn, b),
        is_expensive(_name),
    )


def _extreme(a: T, b: T, fn: str) -> T:
    return a | b if fn.endswith("max") or fn == "maximum" else a & b


def _pow(x: T | float, e: T | float) -> T:
    """Common exponents need no logarithm."""
    if isinstance(x, T) and isinstance(e, (int, float)) and not isinstance(e, bool):
        if e in _POWERS:
            return _POWERS[e](x)
        if x.dtype.is_floating_point and e in _ROOTS:
            return _ROOTS[e](x)
    x, e = flip(x, e)
    if not x.dtype.is_floating_point:
        raise Unlowerable("integers to a power that is no small number")
    return x.fn("pow", e)


_POWERS: dict[float, Callable[[T], T]] = {
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    4: lambda x: (x * x) * (x * x),
}
_ROOTS: dict[float, Callable[[T], T]] = {
    0.5: lambda x: x.fn("sqrt"),
    -0.5: lambda x: x.fn("rsqrt"),
    -1: lambda x: x.fn("reciprocal"),
    -2: lambda x: (x * x).fn("reciprocal"),
}
pointwise("pow", _pow, expensive=True, sharp=True)
pointwise("addcmul", lambda x, a, b, value=1: x + _scaled(a * b, value))
pointwise("addcdiv", lambda x, a, b, value=1: x + _scaled(a, value) / b)


def _lerp(a: T, b: T, w: T | float) -> T:
    """PyTorch starts from the nearer end."""
    if not isinstance(w, T):
        return a + (b - a) * w if abs(w) < 0.5 else b - (b - a) * (1 - w)
    return (w.fn("abs") < 0.5).where(a + w * (b - a), b - (b - a) * (1 - w))


pointwise("lerp", _lerp)


def _hypot(a: T, b: T) -> T:
    """Scaled by a power of two, so that no square is too large or too small; an infinite side wins over NaN."""
    most, down, least, up = (500, 600, -400, 700) if a.dtype is torch.float64 else (60, 70, -40, 100)
    longer = a.fn("abs").fn("maximum", b.fn("abs"))
    large, small = longer > 2.0**most, longer < 2.0**least

    def scaled(x: T, way: int) -> T:
        return x * large.where(x.like(2.0 ** (-down * way)), small.where(x.like(2.0 ** (up * way)), x.like(1.0)))

    x, y = scaled(a, 1), scaled(b, 1)
    length = scaled((x * x + y * y).fn("sqrt"), -1)
    return (a.fn("isinf") | b.fn("isinf")).where(a.like(math.inf), length)


pointwise("hypot", _hypot)

# --- comparisons, logic, bits ---------------------------------------------------------------------------

for _name in names("eq ne lt le gt ge"):
    predicate(_name, lambda a, b, fn=_name: a.compare(fn, b))


def _finite(x: T) -> T:
    return ~(x.fn("isnan") | x.fn("isinf"))


def _float_test(test: Callable[[T], T], otherwise: bool) -> Callable[..., T]:
    return lambda call, x: test(x) if x.dtype.is_floating_point else x.emit.constant(otherwise, torch.bool)


raw("isnan", _float_test(lambda x: x.fn("isnan"), False))
raw("isinf", _float_test(lambda x: x.fn("isinf"), False))
raw("isfinite", _float_test(_finite, True))
raw("isposinf", _float_test(lambda x: x.eq(math.inf), False))
raw("isneginf", _float_test(lambda x: x.eq(-math.inf), False))
raw("logical_and", lambda call, a, b: a & b)
raw("logical_or", lambda call, a, b: a | b)
raw("logical_xor", lambda call, a, b: a ^ b)
raw("logical_not", lambda call, a: ~a)


def _bits(fn: str, logical: Callable[[T, T], T]) -> Callable[..., T]:
    def formula(a: T | int, b: T | int) -> T:
        x, y = flip(a, b)
        return logical(x, x.like(y)) if x.dtype is torch.bool else x.fn(fn, y)

    return formula


pointwise("bitwise_and __and__", _bits("bit_and", lambda a, b: a & b))
pointwise("bitwise_or __or__", _bits("bit_or", lambda a, b: a | b))
pointwise("bitwise_xor __xor__", _bits("bit_xor", lambda a, b: a ^ b))
pointwise("bitwise_not", lambda a: ~a if a.dtype is torch.bool else a.fn("bit_not"))
pointwise("bitwise_left_shift __lshift__", lambda a, b: flip(a, b)[0].fn("shl", b))
pointwise("bitwise_right_shift __rshift__", lambda a, b: flip(a, b)[0].fn("shr", b))

# --- choosing -------------------------------------------------------------------------------------------


def _typed(x: T | float, like: T | None, dtype: torch.dtype) -> T:
    return x.to(dtype) if isinstance(x, T) else like.emit.constant(x, dtype)  # type: ignore[union-attr]


def _where(call: Call, c: T, a: T | float, b: T | float) -> T:
    return c.truth().where(_typed(a, c, call.out.dtype), _typed(b, c, call.out.dtype))


def clamp(x: T, low: T | float | None = None, high: T | float | None = None) -> T:
    x = x if low is None else x.fn("maximum", low)
    return x if high is None else x.fn("minimum", high)


def _nan_to_num(x: T, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> T:
    if not x.dtype.is_floating_point:
        return x
    most = torch.finfo(x.dtype).max
    y = x.fn("isnan").where(0.0 if nan is None else nan, x)
    y = x.eq(math.inf).where(most if posinf is None else posinf, y)
    return x.eq(-math.inf).where(-most if neginf is None else neginf, y)


raw("where.self where.ScalarOther where.ScalarSelf where.Scalar", _where)
raw("masked_fill", lambda call, x, mask, v: _where(call, mask, v, x))
pointwise("clamp clip", clamp, sharp=True)
pointwise("clamp_min", lambda x, low: x.fn("maximum", low), sharp=True)
pointwise("clamp_max", lambda x, high: x.fn("minimum", high), sharp=True)
raw("nan_to_num", lambda call, x, *to: _half_is_wide(call) or _nan_to_num(x, *to))


def _half_is_wide(call: Call) -> None:
    if wide(call.out.dtype) is not call.out.dtype:
        raise Unlowerable("nan_to_num in half precision: its largest number is not that of single precision")


def _triangle(lower: bool) -> Rule:
    def rule(reader: Reader, call: Call, at: Indices) -> T:
        diagonal = call.args[1]
        if not isinstance(diagonal, int):
            raise Unlowerable("a diagonal known only at run time")
        x = reader.read(call.first, at)
        distance = reader.emit.iota(at[-1]) - reader.emit.iota(at[-2])
        keep = distance <= diagonal if lower else distance >= diagonal
        return keep.where(x, x.like(0))

    return Rule(POINTWISE, rule)


define("tril", _triangle(True))
define("triu", _triangle(False))
