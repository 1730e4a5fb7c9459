"""CHLO: what clients of StableHLO write beside it. Functions that few processors have, and arithmetic that broadcasts.

Functions that are hard to round are computed in double precision for narrower numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tessera.frontends.stablehlo.operators import arithmetic, bits, functions, special  # noqa: F401  (their rows)
from tessera.frontends.stablehlo.operators.compare import total_order
from tessera.frontends.stablehlo.registry import TABLE, Row, Site, elementwise, meaning
from tessera.frontends.stablehlo.values import Splat, Value, broadcast_shape, tensor_of

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "acos": special.in_double(torch.acos),
    "acosh": special.in_double(torch.acosh),
    "asin": special.in_double(torch.asin),
    "asinh": special.in_double(torch.asinh),
    "atan": special.in_double(torch.atan),
    "atanh": special.in_double(torch.atanh),
    "cosh": special.cosh,
    "sinh": special.in_double(torch.sinh),
    "tan": torch.tan,
    "square": lambda x: x * x,
    "conj": torch.conj_physical,
    "erf": torch.erf,
    "erfc": special.in_double(torch.erfc),
    "erf_inv": special.in_double(torch.erfinv),
    "lgamma": special.in_double(torch.lgamma),
    "digamma": special.in_double(torch.digamma),
    "bessel_i1e": special.in_double(torch.special.i1e),
    "is_inf": torch.isinf,
    "is_pos_inf": torch.isposinf,
    "is_neg_inf": torch.isneginf,
}


def _enter(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    @elementwise(name, dialect="chlo")
    def run(site: Site, x: torch.Tensor) -> torch.Tensor:
        return site.element.wrap(special.precise(function, x))


for _name, _function in _FUNCTIONS.items():
    _enter(_name, _function)


@elementwise("zeta", dialect="chlo")
def zeta(site: Site, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return torch.special.zeta(x.double(), q.double()).to(x.dtype)


@elementwise("polygamma", dialect="chlo")
def polygamma(site: Site, n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    order, at = n.double(), x.double()
    sign = torch.where(torch.fmod(order, 2) == 0, -1.0, 1.0)
    value = sign * torch.exp(torch.lgamma(order + 1)) * torch.special.zeta(order + 1, at)
    value = torch.where(order == 0, torch.digamma(at), value)
    whole = (order >= 0) & (order == torch.floor(order))
    return torch.where(whole, value, math.nan).to(x.dtype)


@elementwise("next_after", dialect="chlo")
def next_after(site: Site, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype.itemsize > 2:
        return torch.nextafter(x, y)
    words = torch.int16
    up = total_order(y) > total_order(x)
    here = x.contiguous().view(words)
    step = torch.where(up == (here >= 0), 1, -1).to(words)
    moved = (here + step).view(x.dtype)
    tiny = torch.where(y > 0, 1, -32767).to(words).view(x.dtype)  # the smallest number beside zero
    moved = torch.where(x == 0, tiny, moved)
    return torch.where(torch.isnan(x) | torch.isnan(y), math.nan, torch.where(x == y, y, moved))


@meaning("constant_like", dialect="chlo", raw=True)
def constant_like(site: Site, x: Value) -> Value:
    return Splat(site["value"], tuple(x.shape), site.element)  # type: ignore[union-attr]


@meaning("top_k", dialect="chlo")
def top_k(site: Site, x: torch.Tensor) -> list[torch.Tensor]:
    return largest(x, site["k"], site.operand(0).element.floating)


def largest(x: torch.Tensor, k: int, floating: bool) -> list[torch.Tensor]:
    """The k largest of each row with their places; of equal ones the first comes first, and NaN is above all."""
    order = torch.argsort(total_order(x) if floating else x, dim=-1, descending=True, stable=True)[..., :k]
    return [torch.gather(x, -1, order), order.to(torch.int32)]


@meaning("ragged_dot", dialect="chlo")
def ragged_dot(site: Site, a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Rows of `a`, in groups of these sizes, each group times a matrix of its own: (m, k) x (g, k, n)."""
    if a.ndim != 2 or b.ndim != 3 or sizes.ndim != 1:
        raise NotImplementedError("ragged_dot: expected operands (m, k), (g, k, n) and (g)")
    ends = torch.cumsum(sizes.long(), 0)
    row = torch.arange(a.shape[0], device=a.device)
    group = (row[:, None] >= ends[None, :]).sum(1)
    every = torch.einsum("mk,gkn->gmn", a.to(site.element.held), b.to(site.element.held))
    mine = (group[None, :] == torch.arange(b.shape[0], device=a.device)[:, None]).unsqueeze(-1)
    return torch.where(mine, every, 0).sum(0, dtype=site.element.held)


# --- arithmetic that broadcasts as NumPy does ---

_BROADCASTS = (
    "add", "and", "atan2", "compare", "complex", "divide", "maximum", "minimum", "multiply", "next_after", "or",
    "polygamma", "power", "remainder", "select", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "subtract", "xor", "zeta",
)  # fmt: skip


def _broadcasting(name: str, row: Row) -> None:
    @meaning(f"broadcast_{name}", dialect="chlo", raw=True)
    def run(site: Site, *xs: Value) -> object:
        tensors = [tensor_of(x, site.device) for x in xs]
        shape = broadcast_shape([x.shape for x in tensors])
        return row.run(site, *(x.expand(shape) for x in tensors))


for _name in _BROADCASTS:
    _broadcasting(_name, TABLE.get(f"stablehlo.{_name}") or TABLE[f"chlo.{_name}"])
