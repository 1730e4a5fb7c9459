"""Moving elements about: reshape, transpose, broadcast, slice, pad, concatenate, and their forms with dynamic sizes.

One number at every place (`Splat`) stays that through all of them. What quantized tensors do here, their integers do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tessera.frontends.stablehlo.elements import ELEMENTS
from tessera.frontends.stablehlo.registry import Site, meaning
from tessera.frontends.stablehlo.values import Later, Sizes, Splat, Value, elements_of, integers, tensor_of
from tessera.util.errors import CaptureError


def shape_of(site: Site) -> tuple[int, ...]:
    """The result's shape, which must be known from its type."""
    assert site.result.static, f"{site.name} of a dynamic shape"
    return site.result.shape  # type: ignore[return-value]


def broadcast(x: Value, dims: Sequence[int], shape: Sequence[int], site: Site) -> Value:
    """Dimension i of `x` becomes `dims[i]` of the result."""
    if isinstance(x, Splat):
        return Splat(x.number, tuple(shape), x.element)
    x = tensor_of(x, site.device)
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    if order != list(range(len(dims))):
        x = x.permute(order)
    first = min(dims, default=len(shape))  # torch itself puts dimensions in front
    for d in range(first, len(shape)):
        if d not in dims:
            x = x.unsqueeze(d - first)
    return x if same_shape(x.shape, shape) else x.expand(tuple(shape))


def same_shape(a: Sequence[int], b: Sequence[int]) -> bool:
    """Known to be equal; symbols that are not known to be are not asked."""
    return len(a) == len(b) and all(m is n or str(m) == str(n) for m, n in zip(a, b, strict=True))


@meaning("broadcast_in_dim", raw=True, storage=True)
def broadcast_in_dim(site: Site, x: Value) -> Value:
    return broadcast(x, site["broadcast_dimensions"], shape_of(site), site)


@meaning("dynamic_broadcast_in_dim", raw=True, storage=True)
def dynamic_broadcast_in_dim(site: Site, x: Value, shape: Value) -> Value:
    sizes = integers(shape, "the shape of a broadcast")
    site.machine.check(sizes, site.element)
    return broadcast(x, site["broadcast_dimensions"], sizes, site)


@meaning("broadcast", raw=True, storage=True)
def broadcast_(site: Site, x: Value) -> Value:
    sizes = site["broadcast_sizes"]
    rank = site.operand(0).rank
    inner = tuple(x.shape)  # type: ignore[union-attr]
    return broadcast(x, [len(sizes) + i for i in range(rank)], (*sizes, *inner), site)


@meaning("reshape", raw=True, storage=True)
def reshape(site: Site, x: Value) -> Value:
    if isinstance(x, Splat):
        return Splat(x.number, shape_of(site), x.element)
    return reshaped(tensor_of(x, site.device), shape_of(site))


def reshaped(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x if same_shape(x.shape, shape) else x.reshape(tuple(shape))


@meaning("dynamic_reshape", raw=True, storage=True)
def dynamic_reshape(site: Site, x: Value, shape: Value) -> Value:
    sizes = integers(shape, "the shape of a reshape")
    if isinstance(x, Splat):
        return Splat(x.number, tuple(sizes), x.element)
    return reshaped(tensor_of(x, site.device), sizes)


@meaning("transpose", raw=True, storage=True)
def transpose(site: Site, x: Value) -> Value:
    if isinstance(x, Splat):
        return Splat(x.number, tuple(x.shape[i] for i in site["permutation"]), x.element)
    return tensor_of(x, site.device).permute(site["permutation"])


@meaning("concatenate", storage=True)
def concatenate(site: Site, *xs: torch.Tensor) -> torch.Tensor:
    return torch.cat(xs, site["dimension"]) if len(xs) > 1 else xs[0]


@meaning("slice", storage=True)
def slice_(site: Site, x: torch.Tensor) -> torch.Tensor:
    return cut(x, site["start_indices"], site["limit_indices"], site["strides"])


@meaning("real_dynamic_slice", raw=True, storage=True)
def real_dynamic_slice(site: Site, x: Value, start: Value, limit: Value, strides: Value) -> torch.Tensor:
    tensor, steps = tensor_of(x, site.device), integers(strides, "the steps of a slice")
    begins, ends = (list(known.reshape(-1)) if known is not None else [] for known in map(elements_of, (start, limit)))
    for dim, (first, last) in enumerate(zip(begins, ends, strict=True)):
        if isinstance(first, Later) and steps[dim] == 1 and not isinstance(size := last - first, Later):
            place = first.value().reshape(1) + torch.arange(size, device=site.device)
            tensor = torch.index_select(tensor, dim, place)
            begins[dim], ends[dim] = 0, size
    if not begins or any(isinstance(n, Later) for n in (*begins, *ends)):
        raise CaptureError("a slice depends on what a tensor holds, which only a run tells")
    return cut(tensor, begins, ends, steps)


def cut(x: torch.Tensor, start: Sequence[int], limit: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    for dim, (first, last, step) in enumerate(zip(start, limit, strides, strict=True)):
        plain = type(first) is int and first == 0 and type(step) is int and step == 1
        whole = plain and same_shape([last], [x.shape[dim]])
        if not whole:
            x = torch.ops.aten.slice.Tensor(x, dim, first, last, step)
    return x


@meaning("reverse", storage=True)
def reverse(site: Site, x: torch.Tensor) -> torch.Tensor:
    return torch.flip(x, site["dimensions"])


@meaning("iota")
def iota(site: Site) -> torch.Tensor:
    return _iota(site, shape_of(site))


@meaning("dynamic_iota", raw=True)
def dynamic_iota(site: Site, shape: Value) -> torch.Tensor:
    return _iota(site, integers(shape, "the shape of an iota"))


def _iota(site: Site, shape: Sequence[int]) -> torch.Tensor:
    dim, element = site["iota_dimension"], site.element
    site.machine.check([shape[dim]], element)
    if element.kind == "complex":
        row = torch.arange(shape[dim], dtype=element.held.to_real(), device=site.device).to(element.held)
    else:
        narrow = element.integer and element.held.itemsize * 8 != element.bits
        row = torch.arange(shape[dim], dtype=torch.int64 if narrow else element.held, device=site.device)
        row = element.wrap(row).to(element.held)
    inner = [1] * len(shape)
    inner[dim] = shape[dim]
    return row.reshape(inner).expand(tuple(shape))


@meaning("pad", raw=True, storage=True)
def pad(site: Site, x: Value, value: Value) -> torch.Tensor:
    return padded(site, x, value, site["edge_padding_low"], site["edge_padding_high"], site["interior_padding"])


@meaning("dynamic_pad", raw=True, storage=True)
def dynamic_pad(site: Site, x: Value, value: Value, low: Value, high: Value, interior: Value) -> torch.Tensor:
    return padded(site, x, value, *(integers(v, "padding") for v in (low, high, interior)))


def padded(
    site: Site, x: Value, value: Value, low: Sequence[int], high: Sequence[int], interior: Sequence[int]
) -> torch.Tensor:
    """`interior` elements between two, then `low` before and `high` behind; negative ones cut elements off."""
    tensor = tensor_of(x, site.device)
    shape = [_spread(n, k) + a + b for n, k, a, b in zip(tensor.shape, interior, low, high, strict=True)]
    site.machine.check(shape, site.element)
    for dim, between in enumerate(interior):
        if between and not (isinstance(tensor.shape[dim], int) and tensor.shape[dim] == 0):
            tensor = _spread_out(tensor, dim, between, value, site)
    return _edges(tensor, value, low, high, site)


def _spread(n: int, between: int) -> int:
    """How long a dimension is once elements stand between its own."""
    if type(between) is int and between == 0:
        return n
    return n + torch.sym_max(n - 1, 0) * between


def _spread_out(x: torch.Tensor, dim: int, between: int, value: Value, site: Site) -> torch.Tensor:
    count = x.shape[dim]
    low = [0] * (x.ndim + 1)
    high = [0] * (x.ndim + 1)
    high[dim + 1] = between
    wide = _edges(x.unsqueeze(dim + 1), value, low, high, site).flatten(dim, dim + 1)
    return wide.narrow(dim, 0, count * (between + 1) - between)


def _edges(x: torch.Tensor, value: Value, low: Sequence[int], high: Sequence[int], site: Site) -> torch.Tensor:
    if all(type(n) is int and n == 0 for n in (*low, *high)):
        return x
    ends = [n for a, b in reversed(list(zip(low, high, strict=True))) for n in (a, b)]
    if isinstance(value, Splat) and not isinstance(value.number, complex):
        return torch.ops.aten.constant_pad_nd.default(x, ends, value.number)
    fill = tensor_of(value, site.device)
    inside = torch.ops.aten.constant_pad_nd.default(torch.ones_like(x, dtype=torch.bool), ends, 0)
    return torch.where(inside, torch.ops.aten.constant_pad_nd.default(x, ends, 0), fill)


@meaning("get_dimension_size", raw=True, storage=True)
def get_dimension_size(site: Site, x: Value) -> Sizes:
    array = np.empty((), object)
    array[()] = x.shape[site["dimension"]]  # type: ignore[union-attr]
    return Sizes(array, ELEMENTS["i32"])


@meaning("set_dimension_size", raw=True, storage=True)
def set_dimension_size(site: Site, x: Value, size: Value) -> torch.Tensor:
    (count,) = integers(size, "set_dimension_size")
    return tensor_of(x, site.device).narrow(site["dimension"], 0, count)
