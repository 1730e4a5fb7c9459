"""Comparing and choosing."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from tessera.frontends.stablehlo import unsigned64
from tessera.frontends.stablehlo.operators.arithmetic import Operand, both
from tessera.frontends.stablehlo.registry import Site, elementwise
from tessera.frontends.stablehlo.values import Splat, Value, tensor_of

_DIRECTIONS: dict[str, Callable] = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
}  # fmt: skip


@elementwise("compare", numbers=True)
def compare(site: Site, a: Operand, b: Operand) -> torch.Tensor:
    direction = _DIRECTIONS[site["comparison_direction"]]
    element = site.operand(0).element
    if element.unsigned64 and site["comparison_direction"] not in ("EQ", "NE"):
        x, y = both(a, b)
        return direction(unsigned64.ordered(x), unsigned64.ordered(y))
    if site.get("compare_type") == "TOTALORDER" and element.floating:
        x, y = both(a, b)
        return direction(total_order(x), total_order(y))
    return direction(a, b)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def total_order(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order -NaN < -inf < … < -0 < +0 < … < inf < NaN."""
    bits = x.contiguous().view(_BITS[x.dtype.itemsize])
    lowest = torch.iinfo(bits.dtype).max
    return torch.where(bits < 0, bits ^ lowest, bits)


@elementwise("select", raw=True)
def select(site: Site, pred: Value, a: Value, b: Value) -> Value:
    if isinstance(pred, Splat):
        return a if pred.number else b
    pred = tensor_of(pred, site.device)
    x, y = (v.number if isinstance(v, Splat) else tensor_of(v, site.device) for v in (a, b))
    if not isinstance(x, torch.Tensor) and not isinstance(y, torch.Tensor):
        y = torch.full((), y, dtype=site.element.held, device=site.device)
    if not pred.ndim and isinstance(pred, torch.Tensor):
        return torch.where(pred, x, y).expand(_shape(a, b))  # type: ignore[call-overload]
    return torch.where(pred, x, y)  # type: ignore[call-overload]


def _shape(a: Value, b: Value) -> tuple[int, ...]:
    return max((tuple(v.shape) for v in (a, b)), key=len)  # type: ignore[union-attr]


@elementwise("clamp", raw=True)
def clamp(site: Site, low: Value, x: Value, high: Value) -> Value:
    ends = [v.number if isinstance(v, Splat) else tensor_of(v, site.device) for v in (low, high)]
    tensor = tensor_of(x, site.device)
    if site.element.unsigned64:
        low_, high_ = (unsigned64.ordered(both(tensor, v)[1]) for v in ends)
        return unsigned64.ordered(torch.minimum(torch.maximum(unsigned64.ordered(tensor), low_), high_))
    if site.element.kind == "bool":
        return (tensor | both(tensor, ends[0])[1]) & both(tensor, ends[1])[1]
    if all(not isinstance(v, torch.Tensor) for v in ends):
        return torch.clamp(tensor, *ends)  # type: ignore[arg-type]
    return torch.minimum(torch.maximum(tensor, both(tensor, ends[0])[1]), both(tensor, ends[1])[1])
