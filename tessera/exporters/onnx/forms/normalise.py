"""Normalisation, whole where the opset has the operator."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import form
from tessera.ir.types import Size

DOUBLE = 11  # among ONNX's element types


def ones(g: Graph, shape: Sequence[Size], dtype: torch.dtype) -> Ref:
    need(all(isinstance(n, int) for n in shape))
    return g.full(1, dtype, shape)  # type: ignore[arg-type]


def zeros(g: Graph, shape: Sequence[Size], dtype: torch.dtype) -> Ref:
    need(all(isinstance(n, int) for n in shape))
    return g.full(0, dtype, shape)  # type: ignore[arg-type]


def stash(x: Ref) -> int | None:
    """In which type statistics are computed: in single precision unless the input is of more."""
    return DOUBLE if x.dtype == torch.float64 else None


def alike(g: Graph, *operands: Ref | None) -> list[Any]:
    """An input and weights of one dtype, the widest of theirs: under autocast a narrow input meets wide weights."""
    dtypes = [x.dtype for x in operands if x is not None]
    dtype = functools.reduce(torch.promote_types, dtypes)
    return [x if x is None else g.cast(x, dtype) for x in operands]


@form("layer_norm")
def layer_norm(
    g: Graph,
    x: Ref,
    shape: Sequence[int],
    weight: Ref | None = None,
    bias: Ref | None = None,
    eps: float = 1e-5,
    *_: object,
) -> Ref:
    need(x.is_float and len(shape) > 0)
    x, weight, bias = alike(g, x, weight, bias)
    scale = ones(g, shape, x.dtype) if weight is None else weight
    return g.op("LayerNormalization", x, scale, bias, axis=-len(shape), epsilon=float(eps), stash_type=stash(x))


@form("native_layer_norm")
def native_layer_norm(
    g: Graph, x: Ref, shape: Sequence[int], weight: Ref | None, bias: Ref | None, eps: float
) -> list[Ref | None]:
    need(g.results[1:] == [None, None])
    return [layer_norm(g, x, shape, weight, bias, eps), None, None]


@form("rms_norm", since=23)
def rms_norm_whole(g: Graph, x: Ref, shape: Sequence[int], weight: Ref | None = None, eps: float | None = None) -> Ref:
    need(x.is_float)
    x, weight = alike(g, x, weight)
    scale = ones(g, shape, x.dtype) if weight is None else weight
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return g.op("RMSNormalization", x, scale, axis=-len(shape), epsilon=float(eps), stash_type=stash(x))


@form("rms_norm")
def rms_norm(g: Graph, x: Ref, shape: Sequence[int], weight: Ref | None = None, eps: float | None = None) -> Ref:
    need(x.dtype in (torch.float32, torch.float64))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    mean = g.reduce("ReduceMean", g.op("Mul", x, x), [x.ndim - i for i in range(len(shape), 0, -1)], True)
    out = g.op("Div", x, g.op("Sqrt", g.op("Add", mean, g.full(eps, x.dtype))))
    return out if weight is None else g.op("Mul", out, weight)


@form("group_norm", since=21)
def group_norm_whole(
    g: Graph, x: Ref, groups: int, weight: Ref | None = None, bias: Ref | None = None, eps: float = 1e-5, *_: object
) -> Ref:
    need(x.is_float and x.ndim > 2)
    x, weight, bias = alike(g, x, weight, bias)
    channels = [x.sizes[1]]
    scale = ones(g, channels, x.dtype) if weight is None else weight
    shift = zeros(g, channels, x.dtype) if bias is None else bias
    return g.op("GroupNormalization", x, scale, shift, num_groups=groups, epsilon=float(eps), stash_type=stash(x))


@form("group_norm")
def group_norm(
    g: Graph, x: Ref, groups: int, weight: Ref | None = None, bias: Ref | None = None, eps: float = 1e-5, *_: object
) -> Ref:
    """An instance normalisation of groups."""
    need(x.is_float and x.ndim >= 2)
    x, weight, bias = alike(g, x, weight, bias)
    rows = g.reshape(x, [x.sizes[0], groups, -1])
    unit = g.op(
        "InstanceNormalization", rows, ones(g, [groups], x.dtype), zeros(g, [groups], x.dtype), epsilon=float(eps)
    )
    return affine(g, g.reshape(unit, x.sizes), weight, bias, x.ndim)


def affine(g: Graph, x: Ref, weight: Ref | None, bias: Ref | None, rank: int) -> Ref:
    """Scale and shift by channel."""
    for kind, v in (("Mul", weight), ("Add", bias)):
        if v is not None:
            x = g.op(kind, x, g.reshape(v, [*v.sizes, *[1] * (rank - 2)]))
    return x


@form("batch_norm")
def batch_norm(
    g: Graph,
    x: Ref,
    weight: Ref | None,
    bias: Ref | None,
    mean: Ref | None,
    var: Ref | None,
    training: bool,
    momentum: float,
    eps: float,
    *_: object,
) -> Ref:
    need(not training and mean is not None and var is not None and x.is_float and x.ndim >= 2)
    x, weight, bias, mean, var = alike(g, x, weight, bias, mean, var)
    channels = [x.sizes[1]]
    scale = ones(g, channels, x.dtype) if weight is None else weight
    shift = zeros(g, channels, x.dtype) if bias is None else bias
    return g.op("BatchNormalization", x, scale, shift, mean, var, epsilon=float(eps))


@form("_native_batch_norm_legit_no_training")
def native_batch_norm(
    g: Graph, x: Ref, weight: Ref | None, bias: Ref | None, mean: Ref, var: Ref, momentum: float, eps: float
) -> list[Ref | None]:
    need(g.results[1:] == [None, None])
    return [batch_norm(g, x, weight, bias, mean, var, False, momentum, eps), None, None]


@form("instance_norm")
def instance_norm(
    g: Graph,
    x: Ref,
    weight: Ref | None,
    bias: Ref | None,
    mean: Ref | None,
    var: Ref | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *_: object,
) -> Ref:
    if not use_input_stats:
        return batch_norm(g, x, weight, bias, mean, var, False, momentum, eps)
    need(x.is_float and mean is None and x.ndim > 2)
    x, weight, bias = alike(g, x, weight, bias)
    channels = [x.sizes[1]]
    scale = ones(g, channels, x.dtype) if weight is None else weight
    shift = zeros(g, channels, x.dtype) if bias is None else bias
    return g.op("InstanceNormalization", x, scale, shift, epsilon=float(eps))
