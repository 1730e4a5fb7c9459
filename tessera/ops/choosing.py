"""Pointwise operators that choose one of their operands: extremes, clamps, where, masked_fill.

A cotangent goes to the operand that was chosen. PyTorch's tangents are formulas of their own: where operands are equal,
or NaN, they need not choose what its gradients choose, and are not changed here to agree with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Value
from tessera.ir.types import Size
from tessera.ops.families import align, binary, cast, pointwise, select

Tangent = Value | None  # None is zero

# --- extremes -------------------------------------------------------------------------------------


def _between(ts: Sequence[Tangent], share: Value) -> Value:
    """The tangent of the second operand, and a share of the way to that of the first."""
    first, second = ts
    if second is None:
        assert first is not None
        return share * first
    return second + share * (-second if first is None else first - second)


def _extreme(t: Value, loses: Value, ties: Value) -> Value:
    """A tie gives each side half."""
    return aten.masked_fill(aten.where(ties, t / 2, t), loses, 0)


def _two_sided(name: str, wins: Callable, loses: Callable) -> None:
    """maximum, minimum. The gradients of a NaN go to both sides, its tangent is that of the second."""

    def jvp(ts: Sequence[Tangent], y: Value, a: Value, b: Value) -> Value:
        return _between(ts, aten.where(aten.eq(a, b), 0.5, cast(wins(a, b), y.dtype)))

    by = (
        lambda t, a, b, y: _extreme(t, loses(a, b), aten.eq(a, b)),
        lambda t, a, b, y: _extreme(t, wins(a, b), aten.eq(a, b)),
    )
    binary(name, by=by, jvp=jvp)


_two_sided("aten.maximum", aten.gt, aten.lt)
_two_sided("aten.minimum", aten.lt, aten.gt)


def _first_wins(name: str, compare: Callable, compare_tangents: Callable) -> None:
    """fmax, fmin: a NaN loses. Of two equal operands the gradient goes to the first."""

    def wins(a: Value, b: Value, compare: Callable = compare) -> Value:
        return aten.logical_or(compare(a, b), aten.isnan(b))

    by = (lambda t, a, b, y: select(wins(a, b), t), lambda t, a, b, y: aten.masked_fill(t, wins(a, b), 0))
    binary(name, by=by, jvp=lambda ts, y, a, b: _between(ts, wins(a, b, compare_tangents)))


_first_wins("aten.fmax", aten.ge, aten.gt)
_first_wins("aten.fmin", aten.le, aten.le)

# --- clamps ---------------------------------------------------------------------------------------


def _choose(mask: Value, a: Tangent, b: Tangent) -> Tangent:
    if a is None and b is None:
        return None
    return aten.where(mask, 0 if a is None else a, 0 if b is None else b)


def _inside(t: Value, y: Value, x: Value, low: Arg, high: Arg) -> Value:
    """Bounds count as inside."""
    marks = [compare(x, bound) for compare, bound in ((aten.ge, low), (aten.le, high)) if bound is not None]
    return select(aten.logical_and(*marks) if len(marks) == 2 else marks[0], t)


def _below(t: Value, y: Value, x: Value, low: Value, high: Arg) -> Value:
    below = aten.lt(x, low)
    return select(below if high is None else aten.logical_and(aten.lt(low, high), below), t)


def _above(t: Value, y: Value, x: Value, low: Arg, high: Value) -> Value:
    above = aten.gt(x, high)
    return select(above if low is None else aten.logical_or(aten.lt(high, low), above), t)


def _clamp_jvp(ts: Sequence[Tangent], y: Value, x: Value, low: Arg, high: Arg) -> Tangent:
    """Between two tensors bounds count as inside; of one alone they do not."""
    t, *bounds = (*ts, None, None)[:3]
    if not isinstance(low, Value) and not isinstance(high, Value):
        return None if t is None else _inside(t, y, x, low, high)
    if high is None:
        return _choose(aten.gt(x, low), t, bounds[0])
    if low is None:
        return _choose(aten.lt(x, high), t, bounds[1])
    outside = _choose(aten.lt(x, low), bounds[0], _choose(aten.gt(x, high), bounds[1], t))
    return _choose(aten.gt(low, high), bounds[1], outside)


pointwise("aten.clamp", [_inside, _below, _above], jvp=_clamp_jvp)
pointwise(
    "aten.clamp_min",
    [lambda t, y, x, low: select(aten.ge(x, low), t), lambda t, y, x, low: select(aten.lt(x, low), t)],
    jvp=lambda ts, y, x, low: _choose(aten.ge(x, low), *(*ts, None)[:2]),
)
pointwise(
    "aten.clamp_max",
    [lambda t, y, x, high: select(aten.le(x, high), t), lambda t, y, x, high: select(aten.gt(x, high), t)],
    jvp=lambda ts, y, x, high: _choose(aten.le(x, high), *(*ts, None)[:2]),
)

# --- by a mask ------------------------------------------------------------------------------------

for _overload in ("self", "ScalarOther", "ScalarSelf", "Scalar"):
    pointwise(
        f"aten.where.{_overload}",
        [None, lambda t, y, c, a, b: select(c, t), lambda t, y, c, a, b: aten.masked_fill(t, c, 0)],
    )


def _masked_fill_batch(size: Size, on: Sequence[bool], x: Value, mask: Value, value: Arg) -> Value:
    """A value of its own for every row is no longer 0-d, which masked_fill asks for."""
    if on[2]:
        assert isinstance(value, Value)
        x, mask, value = align(on, (x, mask, cast(value, x.dtype)))  # type: ignore[assignment]
        return aten.where(mask, value, x)
    return aten.masked_fill(*align(on[:2], (x, mask)), value)


pointwise(
    "aten.masked_fill",
    [lambda t, y, x, mask, v: aten.masked_fill(t, mask, 0), None, lambda t, y, x, mask, v: select(mask, t)],
    batch=_masked_fill_batch,
)
