"""Random numbers: of the same distribution as PyTorch's. Which ones are drawn is the runtime's own affair.

Runtimes draw single and double precision alone, and take a shape that is known only at the call from a tensor: so every
draw is `…Like` of a fill, and is rounded where the result has fewer bits.
"""

from __future__ import annotations

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.forms.create import filled
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import form

_NARROW = (torch.float16, torch.bfloat16)


def _drawn(g: Graph, kind: str, dtype: torch.dtype) -> Ref:
    """Numbers of the result's shape, in a precision that runtimes draw."""
    like = g.cast(filled(g, 0), dtype)
    return g.op(kind, like, dtype=dtype, shape=g.result.shape)


def _precision(g: Graph) -> torch.dtype:
    dtype = g.result.dtype
    need(dtype.is_floating_point)
    return torch.float32 if dtype in _NARROW else dtype


def uniform(g: Graph) -> Ref:
    """From 0 up to 1, which is never drawn: nor may rounding give it."""
    drawn = _drawn(g, "RandomUniformLike", _precision(g))
    if g.result.dtype in _NARROW:
        drawn = g.op("Min", drawn, g.full(1 - torch.finfo(g.result.dtype).eps / 2, drawn.dtype))
    return drawn


def normal(g: Graph) -> Ref:
    return _drawn(g, "RandomNormalLike", _precision(g))


@form("rand rand_like", draws=True)
def rand(g: Graph, *_: object, **__: object) -> Ref:
    return uniform(g)


@form("randn randn_like", draws=True)
def randn(g: Graph, *_: object, **__: object) -> Ref:
    return normal(g)


@form("normal normal_functional", draws=True)
def shifted(g: Graph, *given: object, **_: object) -> Ref:
    """`normal_functional` names first what it is like; others end with a size."""
    return moved(g, *[x for x in given if isinstance(x, (Ref, float, int))][-2:])


@form("prims.normal", draws=True)
def prims_normal(g: Graph, shape: object, *, mean: object, std: object, **_: object) -> Ref:
    return moved(g, mean, std)


def moved(g: Graph, mean: object, std: object) -> Ref:
    drawn = normal(g)

    def like(x: object) -> Ref:
        return g.cast(x, drawn.dtype) if isinstance(x, Ref) else g.scalar(x, drawn.dtype)

    return g.op("Add", g.op("Mul", drawn, like(std)), like(mean))


@form("uniform", draws=True)
def between(g: Graph, x: Ref, low: float = 0.0, high: float = 1.0, **_: object) -> Ref:
    need(g.result.dtype not in _NARROW)
    drawn = uniform(g)
    return g.op("Add", g.op("Mul", drawn, g.full(high - low, drawn.dtype)), g.full(low, drawn.dtype))


@form("bernoulli.default", draws=True)
def bernoulli(g: Graph, p: Ref, **_: object) -> Ref:
    """One with the probability that each element says."""
    return g.op("Less", _drawn(g, "RandomUniformLike", torch.float64), g.cast(p, torch.float64), dtype=torch.bool)


@form("bernoulli.p", draws=True)
def bernoulli_p(g: Graph, x: Ref, p: float = 0.5, **_: object) -> Ref:
    return g.op("Less", _drawn(g, "RandomUniformLike", torch.float64), g.full(p, torch.float64), dtype=torch.bool)


@form("dropout native_dropout", draws=True)
def dropout(g: Graph, x: Ref, p: float, training: bool | None = True) -> Ref | list[Ref]:
    """What is kept is made larger by as much as is lost."""
    need(isinstance(p, float) and x.is_float)
    drawn = _drawn(g, "RandomUniformLike", torch.float64)
    kept = g.op("GreaterOrEqual", drawn, g.full(p, torch.float64), dtype=torch.bool)
    scaled = g.op("Mul", x, g.full(1 / (1 - p) if p < 1 else 0.0, x.dtype))
    out = g.op("Where", kept, scaled, g.full(0, x.dtype), dtype=x.dtype)
    return out if len(g.results) == 1 else [out, kept]


@form("randint randint_like", draws=True)
def randint(g: Graph, *given: object, **_: object) -> Ref:
    """From 0, or from what stands before the end. In double precision, which tells 2**53 numbers apart."""
    low, high = (0, *[x for x in given if type(x) is int])[-2:]
    need(not any(isinstance(x, Ref) for x in given[1:]) and 0 < high - low <= 1 << 53)
    drawn = _drawn(g, "RandomUniformLike", torch.float64)
    places = g.op("Floor", g.op("Mul", drawn, g.full(high - low, torch.float64)))
    below = g.op("Min", places, g.full(high - low - 1, torch.float64))  # a product may round up
    return g.op("Add", g.cast(below, torch.int64), g.full(low, torch.int64))


@form("multinomial", draws=True)
def multinomial(g: Graph, p: Ref, count: int, replacement: bool = False, **_: object) -> Ref:
    """The largest of log p - log(-log u), over uniform u, is each with probability p; the largest few are drawn without
    being put back."""
    need(isinstance(count, int) and p.is_float)
    wide = torch.float64
    shape = [*p.sizes[:-1], count, p.sizes[-1]] if replacement else p.sizes
    weights = g.op("Log", g.cast(p, wide))
    if replacement:
        weights = g.op("Unsqueeze", weights, g.ints([-2]))
    drawn = g.op("RandomUniformLike", g.expand(g.full(0, wide), shape), dtype=wide, shape=shape)
    drawn = g.op("Max", drawn, g.full(1e-300, wide))
    keys = g.op("Sub", weights, g.op("Log", g.op("Neg", g.op("Log", drawn))))
    if replacement:
        return g.op("ArgMax", keys, axis=-1, keepdims=0, dtype=torch.int64)
    return g.op("TopK", keys, g.ints([count]), axis=-1, outputs=2, dtype=[wide, torch.int64])[1]
