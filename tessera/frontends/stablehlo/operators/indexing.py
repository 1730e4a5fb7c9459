"""Reading and writing at places that are computed: gather, scatter, dynamic slices.

Places out of bounds are moved inside by gather and dynamic slices; scatter leaves them out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.frontends.stablehlo.elements import Quantized
from tessera.frontends.stablehlo.operators import bodies
from tessera.frontends.stablehlo.registry import Site, meaning
from tessera.frontends.stablehlo.values import Value, contents, integers, is_fake, tensor_of
from tessera.util.errors import CaptureError


def _vectors(indices: torch.Tensor, dim: int) -> torch.Tensor:
    """Index vectors along the last dimension."""
    indices = indices.long()
    return indices.unsqueeze(-1) if dim == indices.ndim else indices.movedim(dim, -1)


def _at(x: torch.Tensor, places: Sequence[int], rank: int) -> torch.Tensor:
    """A tensor whose dimensions stand at these places of a result."""
    sizes = iter(x.shape)
    return x.reshape([next(sizes) if d in places else 1 for d in range(rank)])


# --- gather ---


@meaning("gather", raw=True, storage=True)
def gather(site: Site, x: Value, indices: Value) -> torch.Tensor:
    return gathered(site, tensor_of(x, site.device), tensor_of(indices, site.device), site["slice_sizes"])


@meaning("dynamic_gather", raw=True, storage=True)
def dynamic_gather(site: Site, x: Value, indices: Value, sizes: Value) -> torch.Tensor:
    slices = integers(sizes, "the slices of a gather")
    return gathered(site, tensor_of(x, site.device), tensor_of(indices, site.device), slices)


def gathered(site: Site, x: torch.Tensor, indices: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    dims = site["dimension_numbers"]
    offsets, collapsed = dims.get("offset_dims", []), dims.get("collapsed_slice_dims", [])
    x_batch, start_batch = dims.get("operand_batching_dims", []), dims.get("start_indices_batching_dims", [])
    mapped, vector = dims.get("start_index_map", []), dims.get("index_vector_dim", 0)
    starts = _vectors(indices, vector)
    batch_rank = starts.ndim - 1
    rank = batch_rank + len(offsets)
    batch = [d for d in range(rank) if d not in offsets]
    kept = [d for d in range(x.ndim) if d not in collapsed and d not in x_batch]
    if (out := _rows(x, starts, mapped, sizes, collapsed, x_batch, offsets, rank)) is not None:
        return out
    at = []
    for d in range(x.ndim):
        place = torch.zeros([1] * rank, dtype=torch.int64, device=x.device)
        if d in mapped:
            start = starts[..., mapped.index(d)].clamp(min=0)
            start = start.clamp(max=x.shape[d] - sizes[d])
            place = place + _at(start, batch, rank)
        if d in x_batch:
            along = start_batch[x_batch.index(d)]
            along = along if along < vector else along - 1
            place = place + _at(torch.arange(x.shape[d], device=x.device), [batch[along]], rank)
        if d in kept:
            place = place + _at(torch.arange(sizes[d], device=x.device), [offsets[kept.index(d)]], rank)
        at.append(place)
    shape = [0] * rank
    for place, n in zip(batch, starts.shape[:-1], strict=True):
        shape[place] = n
    for place, d in zip(offsets, kept, strict=True):
        shape[place] = sizes[d]
    if not at:
        return x.expand(shape)
    return x[tuple(at)].expand(shape)


def _rows(
    x: torch.Tensor, starts: torch.Tensor, mapped: Sequence[int], sizes: Sequence[int], collapsed: Sequence[int],
    x_batch: Sequence[int], offsets: Sequence[int], rank: int,
) -> torch.Tensor | None:  # fmt: skip
    """Whole slices at places along one dimension: `index_select`, or the rows of a table."""
    if len(mapped) != 1 or x_batch or list(collapsed) != list(mapped):
        return None
    dim = mapped[0]
    if any(str(sizes[d]) != str(x.shape[d]) for d in range(x.ndim) if d != dim):
        return None
    place = starts[..., 0].clamp(min=0, max=x.shape[dim] - 1)
    if x.ndim == 2 and dim == 0 and x.is_floating_point():
        out = torch.nn.functional.embedding(place, x)
        order = _order(range(place.ndim), [place.ndim], offsets, rank)
    else:
        rows = torch.index_select(x, dim, place.reshape(-1))
        out = rows.unflatten(dim, place.shape) if place.ndim else rows.squeeze(dim)
        inside = range(dim, dim + place.ndim)
        order = _order(inside, [d for d in range(out.ndim) if d not in inside], offsets, rank)
    return out if order == list(range(rank)) else out.permute(order)


def _order(batch: Sequence[int], rest: Sequence[int], offsets: Sequence[int], rank: int) -> list[int]:
    first, second = iter(batch), iter(rest)
    return [next(second) if d in offsets else next(first) for d in range(rank)]


# --- scatter ---


@meaning("scatter", raw=True, storage=True)
def scatter(site: Site, *operands: Value) -> list[torch.Tensor]:
    count = len(operands) // 2
    tensors = [tensor_of(v, site.device) for v in operands]
    xs, indices, updates = tensors[:count], tensors[count], tensors[count + 1 :]
    place = _scatter_places(site["scatter_dimension_numbers"], xs[0], indices, updates[0])
    flat = [x.reshape(-1) for x in xs]
    rows = [u.reshape(-1) for u in updates]
    out = combined(site, 0, flat, place.reshape(-1), rows, bool(site.get("unique_indices", False)))
    return [y.reshape(x.shape) for y, x in zip(out, xs, strict=True)]


def _scatter_places(dims: dict, x: torch.Tensor, indices: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Where each element of the update goes in the flat operand; behind its end, where that is out of bounds."""
    window, inserted = dims.get("update_window_dims", []), dims.get("inserted_window_dims", [])
    x_batch, index_batch = dims.get("input_batching_dims", []), dims.get("scatter_indices_batching_dims", [])
    mapped, vector = dims.get("scatter_dims_to_operand_dims", []), dims.get("index_vector_dim", 0)
    starts = _vectors(indices, vector)
    rank = update.ndim
    batch = [d for d in range(rank) if d not in window]
    kept = [d for d in range(x.ndim) if d not in inserted and d not in x_batch]
    flat = torch.zeros([1] * rank, dtype=torch.int64, device=x.device)
    inside = torch.ones([1] * rank, dtype=torch.bool, device=x.device)
    stride = 1
    for d in reversed(range(x.ndim)):
        place = torch.zeros([1] * rank, dtype=torch.int64, device=x.device)
        if d in mapped:
            place = place + _at(starts[..., mapped.index(d)], batch, rank)
        if d in x_batch:
            along = index_batch[x_batch.index(d)]
            along = along if along < vector else along - 1
            place = place + _at(torch.arange(x.shape[d], device=x.device), [batch[along]], rank)
        if d in kept:
            at = window[kept.index(d)]
            place = place + _at(torch.arange(update.shape[at], device=x.device), [at], rank)
        inside = inside & (place >= 0) & (place < x.shape[d])
        flat = flat + place * stride
        stride = stride * x.shape[d]
    return torch.where(inside, flat, stride).expand(update.shape)


_REDUCES = {"add": "sum", "multiply": "prod", "maximum": "amax", "minimum": "amin"}


def combined(
    site: Site, region: int, flat: Sequence[torch.Tensor], place: torch.Tensor, updates: Sequence[torch.Tensor],
    unique: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Each update joined by the body with what stands at its place. A place behind the end is nowhere: one element more
    takes what goes there."""
    longer = [torch.cat([x, x.new_zeros(1)]) for x in flat]
    name = bodies.kind(site.region(region)) if len(flat) == 1 else None
    element = site.element
    x = longer[0]
    if name == "second":
        return [x.index_put((place,), updates[0])[:-1]]
    plain = element.kind in ("int", "uint", "float") and not element.unsigned64 and not isinstance(element, Quantized)
    if name == "add" and (plain or element.unsigned64 or element.kind == "complex"):
        return [element.wrap(x.index_put((place,), updates[0], accumulate=True))[:-1]]
    if (
        name in _REDUCES
        and plain
        and not (name == "multiply" and element.integer and element.held.itemsize * 8 != element.bits)
    ):
        return [element.wrap(x.scatter_reduce(0, place, updates[0], _REDUCES[name]))[:-1]]
    body = bodies.over_elements(site, region)
    if unique:
        new = body(*(y[place] for y in longer), *updates)
        return [y.index_put((place,), n)[:-1] for y, n in zip(longer, new, strict=True)]
    return _in_turn(longer, place, updates, body)


def _in_turn(longer: Sequence[torch.Tensor], place: torch.Tensor, updates: Sequence[torch.Tensor], body) -> list:  # noqa: ANN001
    """The first update of every place at once, then the second of those that have one, and so on."""
    if is_fake(place) or any(is_fake(x) for x in (*longer, *updates)):
        raise CaptureError("how often a place is written depends on what the indices hold, which only a run tells")
    order = torch.argsort(place, stable=True)
    ordered = place[order]
    first = torch.searchsorted(ordered, ordered)
    turn = torch.arange(len(ordered), device=place.device) - first
    out = [x.clone() for x in longer]
    for t in range(int(turn.max()) + 1 if len(turn) else 0):
        chosen = order[turn == t]
        at = place[chosen]
        new = body(*(x[at] for x in out), *(u[chosen] for u in updates))
        for x, n in zip(out, new, strict=True):
            x[at] = n
    return [x[:-1] for x in out]


# --- dynamic slices ---


def _starts(site: Site, x: torch.Tensor, starts: Sequence[Value], sizes: Sequence[int]) -> list:
    """Where the slice begins along each dimension: a number, a tensor, or None for a dimension that it has whole."""
    begins: list = []
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        most = x.shape[dim] - size
        known = contents(start)
        if str(most) == "0":
            begins.append(None)
        elif known is not None:
            begins.append(torch.sym_max(torch.sym_min(known.reshape(-1)[0], most), 0))
        else:
            begins.append(tensor_of(start, site.device).long().clamp(min=0).clamp(max=most))
    return begins


@meaning("dynamic_slice", raw=True, storage=True)
def dynamic_slice(site: Site, x: Value, *starts: Value) -> torch.Tensor:
    tensor, sizes = tensor_of(x, site.device), site["slice_sizes"]
    for dim, begin in enumerate(_starts(site, tensor, starts, sizes)):
        if begin is None:
            continue
        if isinstance(begin, torch.Tensor):
            place = begin.reshape(1) + torch.arange(sizes[dim], device=site.device)
            tensor = torch.index_select(tensor, dim, place)
        else:
            tensor = tensor.narrow(dim, begin, sizes[dim])
    return tensor


@meaning("dynamic_update_slice", raw=True, storage=True)
def dynamic_update_slice(site: Site, x: Value, update: Value, *starts: Value) -> torch.Tensor:
    tensor, new = tensor_of(x, site.device), tensor_of(update, site.device)
    begins = _starts(site, tensor, starts, new.shape)
    part = [d for d, b in enumerate(begins) if b is not None]
    if not part:
        return new
    if len(part) == 1 and not isinstance(begins[part[0]], torch.Tensor):
        dim, begin = part[0], begins[part[0]]
        return torch.slice_scatter(tensor, new, dim, begin, begin + new.shape[dim])
    if len(part) == 1:
        dim = part[0]
        place = begins[dim].reshape(1) + torch.arange(new.shape[dim], device=site.device)
        return torch.index_copy(tensor, dim, place, new)
    at = tuple(
        _at((0 if b is None else b) + torch.arange(new.shape[d], device=site.device), [d], tensor.ndim)
        for d, b in enumerate(begins)
    )
    return tensor.index_put(at, new)
