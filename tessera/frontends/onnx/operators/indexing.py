"""Gathering, scattering, and what only a look at the elements can tell the size of."""

from __future__ import annotations

import math

import numpy as np
import torch

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.allocation import allowed
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import contents, number

Tensor = torch.Tensor
COUNTED = "how many results there are depends on the values of its input"


def _positive(indices: Tensor, size: object) -> Tensor:
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + size, indices)


@operator("Gather", moves=True)
def gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis = axis % x.ndim
    if axis == 0 and x.ndim == 2 and x.is_floating_point() and indices.ndim:  # an embedding stays whole
        return torch.nn.functional.embedding(_positive(indices, x.shape[0]), x)
    if indices.ndim == 0:
        return x.index_select(axis, _positive(indices, x.shape[axis]).reshape(1)).squeeze(axis)
    flat = x.index_select(axis, _positive(indices, x.shape[axis]).reshape(-1))
    return flat.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


@operator("GatherElements", 11, moves=True)
def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return x.gather(axis, _positive(indices, x.shape[axis]))


@operator("GatherND", 11, moves=True)
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    depth = indices.shape[-1]
    batch, inner = tuple(x.shape[:batch_dims]), tuple(indices.shape[batch_dims:-1])
    flat_x = x.reshape(math.prod(batch), *x.shape[batch_dims:])
    flat_places = indices.reshape(math.prod(batch), -1, depth)
    rows = torch.arange(flat_x.shape[0], device=x.device).reshape(-1, 1).expand(flat_places.shape[:2])
    places = [_positive(flat_places[..., i], x.shape[batch_dims + i]) for i in range(depth)]
    return flat_x[(rows, *places)].reshape(*batch, *inner, *x.shape[batch_dims + depth :])


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("ScatterElements", 11, moves=True)
def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    places = _positive(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _reduction(reduction), include_self=True)


@operator("Scatter", 9, 10, moves=True)
def scatter(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0) -> Tensor:
    return x.scatter(axis, _positive(indices, x.shape[axis]), updates)


def _reduction(name: str) -> str:
    if name not in _REDUCTIONS:
        raise OnnxError(f"reduction: expected none, {', '.join(_REDUCTIONS)}, got {name!r}")
    return _REDUCTIONS[name]


@operator("ScatterND", 11, moves=True)
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    depth = indices.shape[-1]
    places = tuple(_positive(indices[..., i], x.shape[i]) for i in range(depth))
    if reduction in ("none", "add"):
        return x.index_put(places, updates, accumulate=reduction == "add")
    flat = torch.zeros_like(places[0])
    for i in range(depth):
        flat = flat * x.shape[i] + places[i]
    rows = x.reshape(math.prod(x.shape[:depth]), -1)
    new = updates.reshape(-1, rows.shape[1])
    where = flat.reshape(-1, 1).expand(new.shape)
    return rows.scatter_reduce(0, where, new, _reduction(reduction), include_self=True).reshape(x.shape)


@operator("OneHot", 9, sizes=(1,))
def one_hot(indices: Tensor, depth: Tensor, values: Tensor, *, axis: int = -1, context: Context) -> Tensor:
    count = int(number(depth))
    allowed([count, *indices.shape], values.element_size(), context)
    places = _positive(indices, count).unsqueeze(axis)
    rank = places.ndim
    classes = torch.arange(count, device=places.device).reshape([-1 if d == axis % rank else 1 for d in range(rank)])
    return torch.where(places == classes, values[1], values[0])


@operator("NonZero", 9, interpreted=COUNTED)
def non_zero(x: Tensor) -> Tensor:
    if x.ndim == 0:
        return torch.zeros((1, int(bool(x))), dtype=torch.int64)
    return torch.nonzero(x).t().contiguous()


@operator("Compress", 9, interpreted=COUNTED)
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    if axis is None:
        x, axis = x.reshape(-1), 0
    return x.index_select(axis, torch.nonzero(condition).reshape(-1))


@operator("Unique", 11, interpreted=COUNTED)
def unique(x: Tensor, *, axis: int | None = None, sorted: int = 1) -> tuple:
    known = contents(x, COUNTED)
    half = isinstance(known, Tensor) and known.dtype == torch.bfloat16
    array = np.asarray(known.float() if half else known)  # type: ignore[attr-defined]
    values, first, inverse, counts = np.unique(array, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not sorted:  # in the order in which they first come
        order = np.argsort(first, kind="stable")
        rank = np.argsort(order, kind="stable")
        values = values.take(order, axis=axis or 0)
        first, counts, inverse = first[order], counts[order], rank[inverse]
    places = tuple(torch.from_numpy(np.ascontiguousarray(a).astype(np.int64)) for a in (first, inverse, counts))
    if values.dtype == object:
        return (values, *places)
    return (torch.from_numpy(values).to(known.dtype), *places)  # type: ignore[attr-defined]


@operator("ArrayFeatureExtractor", domain="ai.onnx.ml", moves=True)
def array_feature_extractor(x: Tensor, indices: Tensor) -> Tensor:
    out = x.index_select(-1, indices.reshape(-1).to(torch.int64))
    return out.reshape(1, -1) if x.ndim == 1 else out
