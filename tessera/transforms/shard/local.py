"""One equation on a rank's own parts.

In: an equation over whole values, its rule, and how it is cut. Out: the local values of its results. Operands are
brought where they must lie, arguments that name sizes name local ones, and what stands in padding is replaced where it
would count. A rule may say itself what a rank computes.
"""

from __future__ import annotations

import torch

from tessera.ir.equation import Arg, Equation, Value, map_values
from tessera.ir.placement import Axes
from tessera.ir.schema import is_pointwise
from tessera.ir.types import Size, TensorType
from tessera.ops.factors.rule import Cut, Factors, tensors
from tessera.transforms.shard.choose import Choice
from tessera.transforms.shard.values import Values, check, placement_of
from tessera.util.errors import RuleError

NEUTRAL = {"sum": 0, "max": float("-inf"), "min": float("inf")}


def local(values: Values, eqn: Equation, rule: Factors, choice: Choice) -> list[Value | None]:
    with values.builder.at(eqn):
        operands = zip(tensors(eqn), choice.operands, strict=True)
        given = [_filled(values, eqn, rule, i, values.bring(v, to)) for i, (v, to) in enumerate(operands)]
        supply = iter(given)

        def swap(v: Value) -> Arg:
            return next(supply) if isinstance(v.type, TensorType) else values.held[v][0]

        args, kwargs = map_values((eqn.args, eqn.kwargs), swap)  # type: ignore[misc]
        if rule.sized and choice.results[0] is not None:
            sizes = list(choice.results[0].local_shape)
            args = tuple(sizes if i in rule.sized else a for i, a in enumerate(args))
        if rule.local is not None:
            return _by_rule(values, eqn, eqn.with_(args=args, kwargs=kwargs), rule, choice)
        hints = ["" if v is None else v.name for v in eqn.outputs]
        return values.emit(eqn.op, args, kwargs, choice.results, hints, eqn.many)


def _by_rule(values: Values, eqn: Equation, here: Equation, rule: Factors, choice: Choice) -> list[Value | None]:
    """What the rule says a rank computes."""

    def start(size: Size, axes: Axes, device: torch.device) -> Value:
        if any(axis in choice.marks for axis in axes):
            raise RuleError(f"{eqn.op}: a part along {axes} has no first element, since its chunks lie apart")
        first_element = builder.emit(values.dist.start, size, axes, device)
        assert isinstance(first_element, Value)
        return first_element

    assert rule.local is not None
    builder = values.builder
    first = len(builder.equations)
    shapes = tuple(v.shape for v in tensors(eqn))
    parts = rule.local(here, Cut(choice.axes, shapes, choice.results, start, values.dist))
    listed = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    names: dict[Value, Value] = {}
    for v, placement, whole in zip(listed, choice.results, eqn.outputs, strict=True):
        if isinstance(v, Value) and placement is not None and whole is not None:
            check(eqn.op, v.tensor, placement)
            names[v] = builder.value(whole.name, v.tensor.placed(placement))
        elif isinstance(v, Value) and whole is not None:  # the same on all ranks: numbers, states of generators
            everywhere = isinstance(v.type, TensorType)
            names[v] = builder.value(whole.name, v.tensor.placed(values.whole(whole)) if everywhere else v.type)
    builder.equations[first:] = [e.renamed(names) for e in builder.equations[first:]]
    return [names.get(v) if isinstance(v, Value) else None for v in listed]


def _filled(values: Values, eqn: Equation, rule: Factors, i: int, x: Value) -> Value:
    """An operand without what its padding holds, where that would count: it is summed away, or looked up."""
    placement = placement_of(x)
    for dim in placement.padded:
        names = rule.operands[i][dim]
        if not names or names[0] in rule.unread:
            continue
        how = rule.reduced.get(names[0])
        looked_up = not x.tensor.is_float and not is_pointwise(eqn.op)
        if how is None and not looked_up:
            continue
        args = (x, dim, placement.shape[dim], placement.splits[dim], _neutral(how or "sum", x.dtype))
        (filled,) = values.emit(values.dist.fill, args, {}, [placement], [x.name])
        assert filled is not None
        x = filled
    return x


def _neutral(how: str, dtype: torch.dtype) -> float | int:
    if how == "sum" or dtype.is_floating_point:
        return NEUTRAL[how]
    limits = torch.iinfo(dtype)
    return limits.min if how == "max" else limits.max
