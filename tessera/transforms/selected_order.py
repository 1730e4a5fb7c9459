"""The order of rows that a mask selects, computed over all rows.

In: an equation that sorts such rows or takes some of them by their order or by their places, the same one reading all
rows, and their mask. Out: its results. Rows that the mask leaves out stand behind all others, whatever they hold.

    aten.sort(z)          -->  gather(z, places), where the rows that count stand first
    aten.topk(z, k)       -->  the first k of them, behind a check that there are as many
    aten.kthvalue(z, k)   -->  the k-th
    aten.median(z)        -->  the one in the middle of those that count
    aten.index(z, [at])   -->  aten.index(z, [place[at]]): places among rows that count, as places among all
"""

from __future__ import annotations

from typing import Any

import torch

from tessera.ir.builder import aten
from tessera.ir.check import RAISE_IF
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ops.factors.rule import arguments, tensors
from tessera.ops.families import cast
from tessera.transforms.selected_masks import Mask
from tessera.transforms.selected_sums import along, among, check_any
from tessera.util.names import names

MIDDLES = names("median nanmedian")
ORDERS = names("sort topk kthvalue") | MIDDLES
PICKS = names("index index_select gather")


def in_order(rewrite: Rewrite, eqn: Equation, here: Equation, mask: Mask, dim: int) -> Any:
    """What sorts rows along the dimension of rows; None where it sorts something else."""
    given, x = arguments(here), tensors(here)[0]
    if not eqn.many:  # the median of all elements
        return _whole_median(eqn, here, mask, dim) if eqn.opname in MIDDLES else None
    if given.get("dim", -1) % x.ndim != dim:
        return None
    if eqn.opname == "sort":
        places = _sorted(x, mask, dim, bool(given.get("descending", False)))
        return _at(x, places, mask, dim)
    if eqn.opname == "topk":
        _at_least(rewrite, eqn, mask, int(given["k"]), "topk(): selected index k out of range")
        places = aten.narrow(_sorted(x, mask, dim, bool(given.get("largest", True))), dim, 0, given["k"])
        return _at(x, places, mask, dim)
    check_any(rewrite, eqn, mask, {tensors(eqn)[0]: dim})
    if eqn.opname == "kthvalue":
        k = int(given["k"])
        _at_least(rewrite, eqn, mask, k, f"kthvalue(): selected number k out of range for dimension {dim}")
        places = aten.narrow(_sorted(x, mask, dim, False), dim, k - 1, 1)
    else:
        places = _middle(x, _sorted(x, mask, dim, False), mask, dim, eqn.opname == "nanmedian")
    found = _at(x, places, mask, dim)
    return found if given.get("keepdim", False) else [aten.squeeze(v, dim) for v in found]


def picks(eqn: Equation, dim: int) -> bool:
    """Does it take what stands at places along this dimension?"""
    if eqn.opname == "index":
        places: Any = eqn.args[1]
        whole = all(v is None for v in places[:-1])
        return whole and len(places) == dim + 1 and places[-1].dtype in (torch.int64, torch.int32)
    return eqn.opname in PICKS and arguments(eqn).get("dim", 0) % tensors(eqn)[0].ndim == dim


def picked(rewrite: Rewrite, eqn: Equation, here: Equation, mask: Mask, of_places: Value | None, sure: bool) -> Any:
    """Rows by their places among those that count. `of_places`: which of the places count, if not all; `sure`: they
    come from the order of such rows, so that none lies beyond them."""
    places = tensors(here)[1]
    if not sure:
        beyond = aten.logical_or(aten.ge(places, mask.count), aten.lt(places, aten.neg(mask.count)))
        beyond = beyond if of_places is None else aten.logical_and(beyond, of_places)
        told = f"{eqn.source}: index out of bounds for as many rows as the mask selects"
        rewrite.builder.record(RAISE_IF, (aten.any(beyond), True, told, "IndexError"), {}, [])
    places = _among_all(mask, places)
    return rewrite.builder.emit(here.op, *here.substitute({tensors(here)[1]: places}).args, **here.kwargs)


def _sorted(x: Value, mask: Mask, dim: int, descending: bool) -> Value:
    """Places among all rows: first of those that count, in the order of x, then of the others."""
    order = aten.sort(x, stable=True, dim=dim, descending=descending)[1]
    out = aten.logical_not(aten.gather(aten.expand(along(mask, x, dim), list(x.shape)), dim, order))
    return aten.gather(order, dim, aten.sort(cast(out, torch.int8), stable=True, dim=dim, descending=False)[1])


def _at(x: Value, places: Value, mask: Mask, dim: int) -> list[Value]:
    return [aten.gather(x, dim, places), among(places, mask)]


def _middle(x: Value, places: Value, mask: Mask, dim: int, skip_nan: bool) -> Value:
    """The place in the middle; where something is no number, and counts, the first such."""
    count, shape = mask.count, [1 if d == dim else n for d, n in enumerate(x.shape)]
    numbers: Value = aten.expand(aten.reshape(count, [1] * x.ndim), shape)
    if x.tensor.is_float:
        unlike = aten.logical_and(aten.isnan(x), along(mask, x, dim))
        numbers = aten.sub(numbers, aten.sum(unlike, [dim], True))
    middle = aten.clamp_min(aten.div(aten.sub(numbers, 1), 2, rounding_mode="floor"), 0)
    if not skip_nan:
        middle = aten.where(aten.lt(numbers, count), numbers, middle)
    return aten.gather(places, dim, middle)


def _whole_median(eqn: Equation, here: Equation, mask: Mask, dim: int) -> Value:
    (x,) = tensors(here)
    if x.ndim > 1:  # its elements are rows
        rows = aten.reshape(aten.expand(along(mask, x, dim), list(x.shape)), [-1])
        size = int(rows.shape[0])  # type: ignore[arg-type]
        mask = Mask(rows, aten.sum(rows), size, (size, size, size))
        x = aten.reshape(x, [-1])
    places = _middle(x, _sorted(x, mask, 0, False), mask, 0, eqn.opname == "nanmedian")
    out = aten.reshape(aten.gather(x, 0, places), [])
    if not x.tensor.is_float:
        return out
    return aten.where(aten.eq(mask.count, 0), aten.full_like(out, float("nan")), out)


def _among_all(mask: Mask, places: Value) -> Value:
    """Places among rows that count, as places among all rows."""
    kept_first = aten.sort(cast(aten.logical_not(mask.rows), torch.int8), stable=True, dim=0, descending=False)[1]
    places = aten.where(aten.lt(places, 0), aten.add(places, mask.count), places)
    flat = aten.index_select(kept_first, 0, aten.clamp(aten.reshape(places, [-1]), 0, mask.every - 1))
    return aten.reshape(flat, list(places.shape))


def _at_least(rewrite: Rewrite, eqn: Equation, mask: Mask, count: int, told: str) -> None:
    fewer = aten.lt(mask.count, count)
    rewrite.builder.record(RAISE_IF, (fewer, True, f"{eqn.source}: {told}", "RuntimeError"), {}, [])
