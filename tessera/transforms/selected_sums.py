"""What rows that a mask selects give together, computed over all rows.

In: an equation that looks at such rows together, the same one reading all rows, and their mask. Out: its results. Rows
that the mask leaves out are replaced by a number that changes nothing.

    aten.sum(z)    -->  aten.sum(where(mask, z, 0))
    aten.mean(z)   -->  that, by how many rows the mask selects
    aten.amax(z)   -->  aten.amax(where(mask, z, -inf)), behind a check that the mask selects any
    aten.argmax(z) -->  the same, counted among the rows that are selected
    aten.std(z)    -->  the root of the mean of squares
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tessera.ir.builder import aten
from tessera.ir.check import KINDS, RAISE_IF
from tessera.ir.equation import Equation, Value
from tessera.ir.printer import callable_of
from tessera.ir.rewrite import Rewrite
from tessera.ops.factors.rule import arguments, tensors
from tessera.ops.families import cast
from tessera.transforms.selected_masks import Mask
from tessera.util.names import names


def _lowest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return 0
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return 1
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


Number = Callable[[torch.dtype], float]
PLACES = names("argmax argmin max min")  # where among the rows: a result of integers
SPREADS = names("var std var_mean std_mean")
NORMS = names("linalg_vector_norm norm")
NEUTRAL: dict[str, Number] = {
    **dict.fromkeys(names("sum mean count_nonzero any mm matmul bmm mv dot cumsum"), lambda dtype: 0),
    **dict.fromkeys(NORMS, lambda dtype: 0),
    **dict.fromkeys(names("prod all cumprod"), lambda dtype: 1),
    **dict.fromkeys(names("amax max argmax logsumexp softmax _softmax log_softmax _log_softmax"), _lowest),
    **dict.fromkeys(names("amin min argmin"), _highest),
}


def along(mask: Mask, v: Value, dim: int) -> Value:
    """The mask as one may read it beside a value."""
    return aten.reshape(mask.rows, [mask.every if d == dim else 1 for d in range(v.ndim)])


def kept(mask: Mask, v: Value, dim: int, other: float) -> Value:
    """A value that holds something else in rows that were left out."""
    return aten.where(along(mask, v, dim), v, aten.full_like(v, other))


def together(rewrite: Rewrite, eqn: Equation, here: Equation, mask: Mask, dims: dict[Value, int]) -> Any:
    """`dims`: of what the equation is given, which dimension is one of rows. None where rows meet in another way."""
    if eqn.opname in SPREADS:
        return _spread(eqn, here, mask, dims)
    neutral = NEUTRAL.get(eqn.opname)
    if neutral is None or (eqn.opname in NORMS and not _positive(eqn)):
        return None
    if eqn.opname in PLACES and not _places_along(eqn, dims):
        return None
    filled = {
        now: kept(mask, now, dims[v], neutral(now.dtype))
        for v, now in zip(tensors(eqn), tensors(here), strict=True) if v in dims
    }  # fmt: skip
    check_any(rewrite, eqn, mask, dims)
    out: Any = rewrite.builder.emit(here.op, *here.substitute(filled).args, **here.kwargs)
    if eqn.opname == "mean":
        return _shared(out, mask)
    if eqn.opname not in PLACES:
        return out
    if not eqn.many:
        return out if not eqn.opname.startswith("arg") else among(out, mask)
    return [out[0], among(out[1], mask)]


def _shared(mean: Any, mask: Mask) -> Value:
    """A mean over all rows, over those that count."""
    return aten.div(aten.mul(mean, mask.every), cast(mask.count, mean.dtype))


def _places_along(eqn: Equation, dims: dict[Value, int]) -> bool:
    """Are places, if it gives any, those of rows?"""
    if len(tensors(eqn)) > 1:  # the larger one of two tensors
        return False
    (x,), dim = tensors(eqn), arguments(eqn).get("dim")
    if dim is None:
        return x.ndim == 1 or not eqn.opname.startswith("arg")
    return dim % x.ndim == dims[x]


def among(places: Value, mask: Mask) -> Value:
    """Places among all rows, as places among those that count."""
    before = aten.sub(aten.cumsum(mask.rows, 0), 1)
    flat = aten.index_select(before, 0, aten.reshape(places, [-1]))
    return aten.reshape(flat, list(places.shape))


def _spread(eqn: Equation, here: Equation, mask: Mask, dims: dict[Value, int]) -> Any:
    given, (x,), (dim,) = arguments(here), tensors(here), dims.values()
    correction = given.get("correction", 1 if given.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    over = given.get("dim") or list(range(x.ndim))
    keep = bool(given.get("keepdim", False))
    other = math.prod(x.shape[d] for d in over if d % x.ndim != dim)
    count = cast(aten.mul(mask.count, other), x.dtype)
    mean = aten.div(aten.sum(kept(mask, x, dim, 0), over, True), count)
    apart = kept(mask, aten.sub(x, mean), dim, 0)
    out = aten.div(aten.sum(aten.mul(apart, apart), over, keep), aten.clamp_min(aten.sub(count, correction), 0))
    out = aten.sqrt(out) if eqn.opname.startswith("std") else out
    if not eqn.many:
        return out
    return [out, mean if keep else aten.reshape(mean, list(out.shape))]


def _positive(eqn: Equation) -> bool:
    given = arguments(eqn)
    order = given.get("ord", given.get("p", 2))
    return order is None or (isinstance(order, (int, float)) and order > 0)


def check_any(rewrite: Rewrite, eqn: Equation, mask: Mask, dims: dict[Value, int]) -> None:
    """What eager raises about no rows, the program raises."""
    if eqn.opname not in names("amax amin max min argmax argmin median nanmedian kthvalue"):
        return
    (x,) = tensors(eqn)
    empty = torch.empty([0 if d == dims[x] else int(n) for d, n in enumerate(x.shape)], dtype=x.dtype)
    try:
        callable_of(eqn.op)(*(empty if a is x else a for a in eqn.args), **eqn.kwargs)
    except tuple(KINDS.values()) as error:
        kind = next((name for name, cls in KINDS.items() if type(error) is cls), "RuntimeError")
        told = (aten.eq(mask.count, 0), True, f"{eqn.source}: the mask selects no row: {error}", kind)
        rewrite.builder.record(RAISE_IF, told, {}, [])
