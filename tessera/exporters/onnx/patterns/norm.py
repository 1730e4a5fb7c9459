"""RMS normalisation that is written out: `w * (x * rsqrt(mean(x²) + eps))`, in single precision or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tessera.exporters.onnx.forms.normalise import rms_norm_whole
from tessera.exporters.onnx.graph import Ref, same
from tessera.exporters.onnx.patterns.makers import Makers, both_ways, is_float, is_plain
from tessera.ir.equation import Arg, Equation, Value

if TYPE_CHECKING:
    from tessera.exporters.onnx.lower import Lowering


@dataclass(frozen=True)
class Unit:
    """`x` divided by the root of the mean of its squares over its last `rank` dimensions."""

    x: Value
    rank: int
    eps: float


def rms_norm(eqn: Equation, makers: Makers) -> Callable[[Lowering], Ref] | None:
    if eqn.opname != "mul" or not is_float(eqn.out) or not is_plain(eqn.out.dtype):
        return None
    for weight, scaled in both_ways(makers.pair(eqn.out, "mul")):
        unit = _unit(makers.uncast(scaled), makers)
        if unit is not None and _fits(weight, scaled, unit, eqn):
            return _writer(unit, weight)
    return None


def _fits(weight: Value, scaled: Value, unit: Unit, eqn: Equation) -> bool:
    """The operator gives the dtype of its input, and scales in it."""
    shape = unit.x.shape[len(unit.x.shape) - unit.rank :]
    same_shape = len(weight.shape) == unit.rank and all(map(same, weight.shape, shape))
    return same_shape and weight.dtype == scaled.dtype == unit.x.dtype == eqn.out.dtype


def _writer(unit: Unit, weight: Value) -> Callable[[Lowering], Ref]:
    def write(lowering: Lowering) -> Ref:
        x, scale = lowering.env[unit.x], lowering.env[weight]
        return rms_norm_whole(lowering.g, x, list(scale.sizes), scale, unit.eps)  # type: ignore[arg-type]

    return write


def _unit(v: Arg, makers: Makers) -> Unit | None:
    """`x * rsqrt(…)` or `x / sqrt(…)`."""
    for x, factor in both_ways(makers.pair(v, "mul")):
        inverse = makers.of(factor, "rsqrt")
        if inverse is None and (power := makers.of(factor, "pow")) is not None and power.args[1] == -0.5:
            inverse = power
        if inverse is not None and (unit := _over(x, inverse.args[0], makers)) is not None:
            return unit
    if (division := makers.pair(v, "div")) is not None:
        root = makers.of(division[1], "sqrt")
        return None if root is None else _over(division[0], root.args[0], makers)
    return None


def _over(x: Value, total: Arg, makers: Makers) -> Unit | None:
    """`mean(x²) + eps` is what is under the root."""
    moved = makers.of(total, "add")
    if moved is None or moved.kwargs or not isinstance(moved.args[1], float):
        return None
    mean = makers.of(moved.args[0], "mean")
    if mean is None or not _is_square(mean.args[0], x, makers):
        return None
    (_, dims, keepdim, *_), _ = mean.bound()
    rank = _trailing(dims, len(x.shape))
    source = makers.uncast(x)
    if not keepdim or rank is None or not isinstance(source, Value):
        return None
    return Unit(source, rank, moved.args[1])


def _is_square(v: Arg, x: Value, makers: Makers) -> bool:
    eqn = makers.of(v, "pow", "square", "mul")
    if eqn is None or eqn.args[0] is not x:
        return False
    return eqn.opname == "square" or eqn.args[1] is x or (eqn.opname == "pow" and eqn.args[1] == 2)


def _trailing(dims: Any, rank: int) -> int | None:
    """How many dimensions, if they are the last ones."""
    if not isinstance(dims, (list, tuple)) or not dims:
        return None
    listed = sorted(d % rank for d in dims)
    return len(listed) if listed == list(range(rank - len(listed), rank)) else None
