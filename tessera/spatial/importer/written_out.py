"""Operators without a form, written out in PyTorch's own words.

In: the arguments of an operator. Out: its results, by operators that have forms or that PyTorch takes apart. Data
decides addresses and never times: what is sorted is counted, what is scattered is found by comparing places, so that
the work is the same for any data. It is the product of two sizes, of which `LARGEST` is the most that is taken.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F

from tessera.spatial.errors import MapError
from tessera.torch_internals.operators import aten_name

Tensor = torch.Tensor
Written = Callable[..., object]
Fn = TypeVar("Fn", bound=Written)
WRITTEN: dict[str, Written] = {}
LARGEST = 1 << 26  # pairs of elements that are compared


def written(text: str, asks: bool = False) -> Callable[[Fn], Fn]:
    """Says how operators are computed; one for several `asks` which of them it is."""

    def add(fn: Fn) -> Fn:
        WRITTEN.update({name: functools.partial(fn, name) if asks else fn for name in text.split()})
        return fn

    return add


def written_out(op: object) -> Written | None:
    """What says how an operator is computed, if anything does."""
    space = getattr(op, "namespace", "")
    return WRITTEN.get(aten_name(op) if space == "aten" else f"{space}.{aten_name(op)}")


def compared(what: str, *counts: int) -> None:
    if math.prod(counts) > LARGEST:
        raise MapError(f"{what} compares {' × '.join(f'{n:,}' for n in counts)} elements: expected at most {LARGEST:,}")


def _sum_of_one(hit: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """The one element that is hit along a dimension; what is not is never added, so that infinities stay apart."""
    wide = x.to(torch.int32) if x.dtype == torch.bool else x
    return torch.where(hit, wide, torch.zeros((), dtype=wide.dtype)).sum(dim, dtype=wide.dtype).to(x.dtype)


# --- order ---


def _ranks(x: Tensor, descending: bool) -> Tensor:
    """The place of each element of a row when it is sorted; equals keep their order, and what is no number is last."""
    n = x.shape[-1]
    compared("sorting", x.numel(), n)
    mine, other = x.unsqueeze(-1), x.unsqueeze(-2)
    before, same = (other > mine if descending else other < mine), other == mine
    if x.is_floating_point():
        nan, others = mine != mine, other != other
        before = before | (others & ~nan if descending else nan & ~others)
        same = same | (nan & others)
    first = torch.arange(n).unsqueeze(0) < torch.arange(n).unsqueeze(1)
    return (before | (same & first)).to(torch.int64).sum(-1)


def _sorted(x: Tensor, dim: int, descending: bool, count: int) -> tuple[Tensor, Tensor]:
    rows = (x.reshape(1) if x.ndim == 0 else x).movedim(dim, -1)
    n = rows.shape[-1]
    hit = _ranks(rows, descending).unsqueeze(-2) == torch.arange(count).unsqueeze(-1)  # […, count, n]
    values, places = _sum_of_one(hit, rows.unsqueeze(-2)), _sum_of_one(hit, torch.arange(n))
    found = values.movedim(-1, dim), places.movedim(-1, dim)
    return found if x.ndim else (found[0].reshape(()), found[1].reshape(()))


@written("sort")
def sort(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> tuple[Tensor, Tensor]:
    return _sorted(x, dim, descending, x.shape[dim] if x.ndim else 1)


@written("topk")
def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> tuple[Tensor, Tensor]:
    return _sorted(x, dim, largest, k)


@written("kthvalue")
def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, places = (t.select(dim, k - 1) for t in _sorted(x, dim, False, k))
    return (values.unsqueeze(dim), places.unsqueeze(dim)) if keepdim else (values, places)


@written("median")
def median(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """The lower of the two in the middle; without a dimension, of all elements. The first that is no number, if any."""
    if dim is None:
        return median(x.reshape(-1), 0)[0]
    values, places = kthvalue(x, (x.shape[dim] + 1) // 2 if x.ndim else 1, dim, keepdim)
    if not x.is_floating_point():
        return values, places
    none = x != x
    some = none.any(dim, keepdim)
    first = none.to(torch.int32).argmax(dim, keepdim)
    return torch.where(some, torch.full((), math.nan, dtype=x.dtype), values), torch.where(some, first, places)


@written("max min", asks=True)
def extreme(name: str, x: Tensor, *args: object) -> object:
    """With a dimension: values and places."""
    if not args:
        return x.amax() if name == "max" else x.amin()
    if isinstance(args[0], Tensor):
        return torch.maximum(x, args[0]) if name == "max" else torch.minimum(x, args[0])
    dim, keepdim = int(args[0]), bool(args[1]) if len(args) > 1 else False  # type: ignore[call-overload]
    largest, place = (torch.amax, torch.argmax) if name == "max" else (torch.amin, torch.argmin)
    return largest(x, dim, keepdim), place(x, dim, keepdim)


# --- along a row ---


@written("cumsum")
def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    kind = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    if x.ndim == 0:
        return x.to(kind)
    rows, n = x.to(kind).movedim(dim, -1).unsqueeze(-2), x.shape[dim]
    compared("cumsum", x.numel(), n)
    upto = torch.ones(n, n, dtype=torch.bool).tril()
    return torch.where(upto, rows, torch.zeros((), dtype=kind)).sum(-1, dtype=kind).movedim(-1, dim)


@written("prod")
def prod(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Halves multiplied with each other."""
    x = x.to(dtype or (x.dtype if x.is_floating_point() else torch.int64))
    rows = x.reshape(-1) if dim is None else x.movedim(dim, -1)
    while (n := rows.shape[-1]) > 1:
        both = rows[..., : n // 2] * rows[..., n // 2 : 2 * (n // 2)]
        rows = torch.cat([both, rows[..., -1:]], -1) if n % 2 else both
    result = rows.squeeze(-1) if rows.shape[-1] else rows.new_ones(rows.shape[:-1])
    return result.unsqueeze(dim) if dim is not None and keepdim else result


@written("cumprod")
def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    rows, n = x.movedim(dim, -1).unsqueeze(-2), x.shape[dim]
    compared("cumprod", x.numel(), n)
    upto = torch.where(torch.ones(n, n, dtype=torch.bool).tril(), rows, torch.ones((), dtype=x.dtype))
    return prod(upto, -1, dtype=dtype).movedim(-1, dim)


@written("bucketize searchsorted", asks=True)
def bucketize(
    name: str, a: Tensor, b: Tensor, *, right: bool = False, out_int32: bool = False, side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """How many boundaries lie below, or at most at, a value."""
    if sorter is not None:
        return NotImplemented
    right = right or side == "right"
    x, bounds = (a, b) if name == "bucketize" else (b, a)
    compared(name, x.numel(), bounds.shape[-1])
    bounds = bounds.unsqueeze(-2) if bounds.ndim > 1 else bounds
    # What is no number stands behind all of them.
    below = ~(bounds > x.unsqueeze(-1) if right else bounds >= x.unsqueeze(-1))
    return below.to(torch.int64).sum(-1).to(torch.int32 if out_int32 else torch.int64)


@written("histc")
def histc(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    """Where the range is said; of the data's own range a bin's edges would be data."""
    if low >= high:
        return NotImplemented
    compared("histc", x.numel(), bins)
    place = torch.minimum(((x - low) / (high - low) * bins).floor(), torch.full((), bins - 1.0, dtype=x.dtype))
    place = torch.where((x >= low) & (x <= high), place, torch.full((), -1.0, dtype=x.dtype)).reshape(1, -1)
    return (place == torch.arange(bins, dtype=x.dtype).unsqueeze(-1)).to(x.dtype).sum(-1)


# --- places that data chooses ---


def _wrapped(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index).to(torch.int64)


def rows_of(table: Tensor, at: Tensor) -> Tensor:
    """Rows of the first dimension, [places…, the other dimensions]."""
    flat = table.reshape(table.shape[0], math.prod(table.shape[1:]))
    return F.embedding(at, flat).reshape(*at.shape, *table.shape[1:])


@written("index _unsafe_index")
def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Rows of the dimensions that are indexed, folded into one."""
    dims = [d for d, i in enumerate(indices) if i is not None]
    places = torch.broadcast_tensors(*(i for i in indices if i is not None))
    if any(i.dtype in (torch.bool, torch.uint8) for i in places):
        return NotImplemented
    rest = [d for d in range(x.ndim) if d not in dims]
    at = _flat([_wrapped(i, x.shape[d]) for i, d in zip(places, dims, strict=True)], [x.shape[d] for d in dims])
    table = x.permute(*dims, *rest).reshape(math.prod(x.shape[d] for d in dims), *(x.shape[d] for d in rest))
    rows = rows_of(table, at)
    apart = any(b - a > 1 for a, b in itertools.pairwise(dims))
    before = 0 if apart else dims[0]  # where the dimensions of the places go
    order = [*range(at.ndim, at.ndim + before), *range(at.ndim), *range(at.ndim + before, rows.ndim)]
    return rows.permute(order)


def _flat(places: Sequence[Tensor], sizes: Sequence[int], chosen: Sequence[int] | None = None) -> Tensor:
    """The number of each element when all dimensions are one. A place outside of its own dimension (of those that are
    `chosen` by data) would be another element's; it becomes one outside of all, which the machine refuses."""
    at, inside = places[0], None
    for place, size in zip(places[1:], sizes[1:], strict=True):
        at = at * size + place
    for d in range(len(places)) if chosen is None else chosen:
        here = (places[d] >= 0) & (places[d] < sizes[d])
        inside = here if inside is None else inside & here
    return at if inside is None or len(places) == 1 else torch.where(inside, at, -torch.ones((), dtype=at.dtype))


@written("index_select")
def index_select(x: Tensor, dim: int, places: Tensor) -> Tensor:
    return rows_of(x.movedim(dim, 0), places.reshape(-1)).movedim(0, dim)


@written("gather")
def gather(x: Tensor, dim: int, places: Tensor, *, sparse_grad: bool = False) -> Tensor:
    grid = [torch.arange(n).reshape([-1 if d == e else 1 for e in range(x.ndim)]) for d, n in enumerate(places.shape)]
    at = [places if d == dim % x.ndim else grid[d].expand(places.shape) for d in range(x.ndim)]
    return rows_of(x.reshape(-1), _flat(at, x.shape, [dim % x.ndim]).to(torch.int64))


def _scattered(x: Tensor, dim: int, places: Tensor, source: Tensor, how: str) -> Tensor:
    """What each place of x ends as. Of several that are written to one place the last one stays."""
    dim, count = dim % x.ndim, x.shape[dim]
    compared("scatter", places.numel(), count)
    source = source[tuple(slice(0, n) for n in places.shape)]
    at, new = (t.movedim(dim, -1).unsqueeze(-2) for t in (places, source))
    hit = at == torch.arange(count).unsqueeze(-1)  # […, count, written]
    if how == "last":
        order = torch.arange(1, places.shape[dim] + 1)
        last = torch.where(hit, order, torch.zeros((), dtype=torch.int64)).amax(-1, keepdim=True)
        result, there = _sum_of_one(order == last, new), last.squeeze(-1) > 0
    else:
        zero = {"sum": 0, "amax": -math.inf, "amin": math.inf}[how]
        if not x.is_floating_point() and how != "sum":
            zero = torch.iinfo(x.dtype).min if how == "amax" else torch.iinfo(x.dtype).max
        filled = torch.where(hit, new, torch.full((), zero, dtype=x.dtype))
        result = filled.sum(-1, dtype=x.dtype) if how == "sum" else getattr(filled, how)(-1)
        there = hit.any(-1)
    sides = [n for d in reversed(range(x.ndim)) for n in (0, 0 if d == dim else x.shape[d] - places.shape[d])]
    result, there = (F.pad(t.movedim(-1, dim), sides) for t in (result, there))
    if how == "last":
        return torch.where(there, result, x)
    both = {"sum": torch.add, "amax": torch.maximum, "amin": torch.minimum}[how](x, result)
    return torch.where(there, both, x)


@written("scatter scatter_add", asks=True)
def scatter(name: str, x: Tensor, dim: int, places: Tensor, source: object, *, reduce: str | None = None) -> Tensor:
    if reduce not in (None, "add"):
        return NotImplemented
    new = source if isinstance(source, Tensor) else torch.full((), source, dtype=x.dtype)  # type: ignore[call-overload]
    new = new.expand(places.shape) if new.ndim == 0 else new
    if x.ndim == 0:
        return new
    return _scattered(x, dim, places, new, "sum" if name == "scatter_add" or reduce == "add" else "last")


@written("scatter_reduce")
def scatter_reduce(
    x: Tensor, dim: int, places: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if not include_self or reduce not in ("sum", "amax", "amin") or not x.ndim:
        return NotImplemented
    return _scattered(x, dim, places, source, reduce)


@written("index_add index_copy", asks=True)
def index_add(name: str, x: Tensor, dim: int, places: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    source = source if alpha == 1 else source * alpha
    every = places.reshape([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)]).expand(source.shape)
    return _scattered(x, dim, every, source, "sum" if name == "index_add" else "last")


@written("index_put _unsafe_index_put")
def index_put(x: Tensor, indices: Sequence[Tensor | None], rows: Tensor, accumulate: bool = False) -> Tensor:
    """Into another tensor than a state; a mask chooses where one number goes."""
    given = [i for i in indices if i is not None]
    if len(given) == 1 and given[0].dtype == torch.bool:
        if rows.numel() != 1 or indices[0] is None:
            return NotImplemented
        mask, one = given[0].reshape(*given[0].shape, *[1] * (x.ndim - given[0].ndim)), rows.reshape(())
        return torch.where(mask, x + one if accumulate else one, x)
    dims = [d for d, i in enumerate(indices) if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given) or dims != list(range(dims[0], dims[-1] + 1)):
        return NotImplemented
    places = torch.broadcast_tensors(*given)
    sizes = [x.shape[d] for d in dims]
    at = _flat([_wrapped(i, n) for i, n in zip(places, sizes, strict=True)], sizes)
    before, behind = x.shape[: dims[0]], x.shape[dims[-1] + 1 :]
    new = rows.expand(*before, *at.shape, *behind).reshape(*before, at.numel(), *behind)
    flat = x.reshape(*before, math.prod(sizes), *behind)
    written = index_add("index_add" if accumulate else "index_copy", flat, len(before), at.reshape(-1), new)
    return written.reshape(x.shape)


# --- signs, and what is no number ---


@written("signbit")
def signbit(x: Tensor) -> Tensor:
    return torch.copysign(torch.ones((), dtype=x.dtype), x) < 0 if x.is_floating_point() else x < 0


@written("fmax fmin", asks=True)
def fmax(name: str, a: Tensor, b: Tensor) -> Tensor:
    """The other one, where one is no number."""
    best = torch.maximum(a, b) if name == "fmax" else torch.minimum(a, b)
    return torch.where(a != a, b, torch.where(b != b, a, best))


@written("angle")
def angle(x: Tensor) -> Tensor:
    """Of a real number: 0 or π."""
    kind = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    turned = torch.where(x < 0, torch.full((), math.pi, dtype=kind), torch.zeros((), dtype=kind))
    return torch.where(x != x, x.to(kind), turned)


@written("copy")
def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(x.dtype).expand(x.shape)
