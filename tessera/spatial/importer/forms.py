"""Operators by their forms: arithmetic by tables, products, reductions, and what is made of these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from tessera.spatial.graph import Number
from tessera.spatial.importer.importer import FORMS, Importer, form, sizes
from tessera.spatial.importer.moves import chosen
from tessera.spatial.importer.values import Item, Known, Lazy
from tessera.spatial.maps import concatenated
from tessera.util.names import names

TOP = 8  # of a row: how many are found one after the other

# Functions of the vector unit that an operator is by itself.
_SAME = names(
    """
    exp expm1 log log1p sqrt rsqrt sigmoid tanh erf sin cos abs neg sign relu silu
    maximum minimum eq ne lt le gt ge mul remainder asin acos atan asinh acosh atanh erfinv lgamma digamma i0 atan2
    copysign gcd bitwise_left_shift bitwise_right_shift
    """
)


def _elementwise(fn: str) -> Callable[..., Item]:
    return lambda im, *args: im.apply(fn, *args)


for _name in sorted(_SAME):
    FORMS[_name] = _elementwise(_name)
for _name in ("erfcx", "i0e", "i1", "i1e", "ndtri"):
    FORMS[f"special_{_name}"] = _elementwise(_name)
for _name, _side in (("__lshift__", "left"), ("__rshift__", "right")):
    FORMS[_name] = _elementwise(f"bitwise_{_side}_shift")


@form("floor ceil trunc round")
def rounded(im: Importer, x: Item, decimals: int = 0) -> Item:
    """To so many decimals: what is scaled up is rounded and scaled down. Integers are whole already."""
    assert im.eqn is not None
    if not im.eqn.results()[0].dtype.is_floating_point:
        return x
    if not decimals:
        return im.apply(im.eqn.opname, x)
    scale = float(10 ** abs(decimals))
    up, down = ("mul", "div") if decimals > 0 else ("div", "mul")
    return im.apply(down, im.apply("round", im.apply(up, x, scale)), scale)


@form("reciprocal")
def reciprocal(im: Importer, x: Item) -> Item:
    return im.apply("div", 1.0, x)


@form("logical_and bitwise_and logical_or bitwise_or logical_xor bitwise_xor")
def both(im: Importer, a: Item, b: Item) -> Item:
    """Truth values are 0 and 1."""
    assert im.eqn is not None
    if im.eqn.results()[0].dtype != torch.bool:
        return im.apply(im.eqn.opname, a, b)
    a, b = (im.values.cast(x, torch.bool) for x in (a, b))
    return im.apply({"and": "minimum", "xor": "ne"}.get(im.eqn.opname[-3:], "maximum"), a, b)


@form("logical_not bitwise_not")
def opposite(im: Importer, x: Item) -> Item:
    assert im.eqn is not None
    return im.apply("eq", x, 0) if im.eqn.results()[0].dtype == torch.bool else im.apply("sub", -1, x)


@form("add")
def add(im: Importer, a: Item, b: Item, alpha: float = 1) -> Item:
    return im.apply("add", a, b if alpha == 1 else im.apply("mul", b, alpha))


@form("sub")
def sub(im: Importer, a: Item, b: Item, alpha: float = 1) -> Item:
    return im.apply("sub", a, b if alpha == 1 else im.apply("mul", b, alpha))


@form("rsub")
def rsub(im: Importer, a: Item, b: Item, alpha: float = 1) -> Item:
    return im.apply("sub", b, a if alpha == 1 else im.apply("mul", a, alpha))


@form("div")
def div(im: Importer, a: Item, b: Item, rounding_mode: str | None = None) -> Item:
    assert im.eqn is not None
    if not im.eqn.results()[0].dtype.is_floating_point:
        return NotImplemented
    if rounding_mode is None:
        a, b = (im.values.cast(x, im.eqn.results()[0].dtype) if isinstance(x, (Lazy, Known)) else x for x in (a, b))
        return im.apply("div", a, b)
    return im.apply({"floor": "floor", "trunc": "trunc"}[rounding_mode], im.apply("div", a, b))


@form("pow")
def power(im: Importer, x: Item, exponent: Item | float) -> Item:
    if exponent == 2 and not isinstance(x, (int, float)):
        x = im.values.plain(x)
        return im.apply("mul", x, x)
    if exponent == 0.5:
        return im.apply("sqrt", x)
    assert im.eqn is not None
    if not im.eqn.results()[0].dtype.is_floating_point:  # the unit computes powers in floats
        return NotImplemented
    return im.apply("pow", x, exponent)


@form("square")
def square(im: Importer, x: Item) -> Item | list[Item]:
    return power(im, x, 2)


@form("where")
def where(im: Importer, c: Item, a: Item | float, b: Item | float) -> Item:
    return im.apply("where", c, a, b)


@form("masked_fill")
def masked_fill(im: Importer, x: Item, mask: Item, value: Item | float) -> Item:
    return im.apply("where", mask, value, x)


@form("clamp")
def clamp(im: Importer, x: Item, low: Item | float | None = None, high: Item | float | None = None) -> Item:
    x = x if low is None else im.apply("maximum", x, low)
    return x if high is None else im.apply("minimum", x, high)


@form("gelu")
def gelu(im: Importer, x: Item, approximate: str = "none") -> Item:
    return im.apply("gelu" if approximate == "none" else "gelu_tanh", x)


@form("_to_copy to convert_element_type")
def to_copy(im: Importer, x: Item, *args: object, **kwargs: object) -> Item:
    assert im.eqn is not None
    return im.values.cast(x, im.eqn.results()[0].dtype)


@form("full_like zeros_like ones_like")
def like(im: Importer, x: Item, value: float | None = None, *_: object, **kwargs: object) -> Item:
    """Numbers that depend on nothing but a shape."""
    assert im.eqn is not None
    out = im.eqn.results()[0]
    number = {"zeros_like": 0, "ones_like": 1}.get(im.eqn.opname, value)
    return Known(torch.tensor(number, dtype=out.dtype).expand(sizes(out)), out.name)


# --- products ---


@form("mm bmm matmul _int_mm")
def matmul(im: Importer, a: Item, b: Item) -> Item:
    assert im.eqn is not None
    left, right = (len(im.values.lazy(x).shape) for x in (a, b))
    if left < 2 or right < 2:
        a = im.relaid(a, lambda t: t.reshape(1, *t.shape)) if left == 1 else a
        b = im.relaid(b, lambda t: t.reshape(*t.shape, 1)) if right == 1 else b
    y = im.product(a, b)
    shape = sizes(im.eqn.results()[0])
    return y if y.shape == shape else _viewed(y, shape)


def _viewed(y: Lazy, shape: tuple[int, ...]) -> Lazy:
    """Another shape of the same elements, in the same order."""
    operands = tuple(o.reshape(*shape) for o in y.operands)
    return Lazy(shape, y.dtype, y.tree, operands, y.name, y.source)


def turned(im: Importer, w: Item) -> Item:
    if isinstance(w, Known):
        return replace(w, data=w.data.transpose(-1, -2), name=f"{w.name}.T")
    return im.relaid(w, lambda t: t.transpose(-1, -2))


@form("linear")
def linear(im: Importer, x: Item, w: Item, b: Item | None = None) -> Item:
    if len(im.values.lazy(x).shape) == 1:
        return NotImplemented
    y = im.product(x, turned(im, w))
    return y if b is None else im.apply("add", y, b)


@form("_scaled_mm")
def scaled_mm(
    im: Importer, a: Item, b: Item, by: Item, and_by: Item, bias: Item | None = None, result: Item | None = None,
    *_: object,
) -> Item:  # fmt: skip
    """A product of eight bits, times scales: one for all, or one for each row and column."""
    if result is not None:
        return NotImplemented
    wide = torch.float32
    y: Item = im.product(a, b, wide)
    for scale in (by, and_by):
        if im.values.lazy(scale).tree != Number(1.0):
            y = im.apply("mul", y, scale, dtype=wide)
    return y if bias is None else im.apply("add", y, bias, dtype=wide)


@form("addmm baddbmm")
def addmm(im: Importer, c: Item, a: Item, b: Item, beta: float = 1, alpha: float = 1) -> Item:
    y = im.product(a, b)
    y = y if alpha == 1 else im.apply("mul", y, alpha)
    return y if beta == 0 else im.apply("add", y, c if beta == 1 else im.apply("mul", c, beta))


@form("scaled_dot_product_attention")
def attention(
    im: Importer, q: Item, k: Item, v: Item, mask: Item | None = None, dropout: float = 0.0, causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Item:  # fmt: skip
    """Scores, their softmax, and the sum of values; queries that read the same keys are rows of one product."""
    if dropout:
        return NotImplemented
    queries, keys = im.values.lazy(q).shape, im.values.lazy(k).shape
    times = queries[-3] // keys[-3] if enable_gqa else 1
    groups = (*queries[:-3], keys[-3], times * queries[-2]) if times > 1 else queries[:-1]
    scale = 1 / math.sqrt(queries[-1]) if scale is None else scale
    wide = torch.promote_types(im.values.lazy(q).dtype, torch.float32)
    rows = im.relaid(q, lambda t: t.reshape(*groups, queries[-1])) if times > 1 else q
    scores: Item = im.apply(
        "mul", _viewed(im.product(rows, turned(im, k)), (*queries[:-1], keys[-2])), scale, dtype=wide
    )
    if causal:
        below = Known(torch.ones(queries[-2], keys[-2], dtype=torch.bool).tril(), "causal")
        scores = im.apply("where", below, scores, -math.inf, dtype=wide)
    if mask is not None and im.values.lazy(mask).dtype == torch.bool:
        scores = im.apply("where", mask, scores, -math.inf, dtype=wide)
    elif mask is not None:
        scores = im.apply("add", scores, mask, dtype=wide)
    chances = im.values.plain(im.values.cast(softmax(im, scores, -1, safe=mask is not None), im.values.lazy(v).dtype))
    y = im.product(_viewed(chances, (*groups, keys[-2])), v)
    return _viewed(y, (*queries[:-1], y.shape[-1]))


# --- reductions and norms ---


def softmax(im: Importer, x: Item, dim: int, dtype: torch.dtype | None = None, safe: bool = False) -> Lazy:
    x = im.values.plain(x if dtype is None else im.values.cast(x, dtype))
    wide = torch.promote_types(x.dtype, torch.float32)
    top = im.reduce("max", x, [dim], True, wide)
    if safe:  # a row that is masked whole gives zeros
        top = im.values.plain(im.apply("maximum", top, torch.finfo(wide).min, dtype=wide))
    e = im.values.plain(im.apply("exp", im.apply("sub", x, top, dtype=wide), dtype=wide))
    total = im.reduce("sum", e, [dim], True, wide)
    if safe:
        total = im.apply("maximum", total, torch.finfo(wide).tiny, dtype=wide)
    return im.apply("div", e, total, dtype=wide)


@form("softmax _softmax")
def softmax_form(im: Importer, x: Item, dim: int, option: object = None) -> Item:
    return softmax(im, x, dim, option if isinstance(option, torch.dtype) else None)


@form("_safe_softmax")
def safe_softmax(im: Importer, x: Item, dim: int, dtype: torch.dtype | None = None) -> Item:
    return softmax(im, x, dim, dtype, safe=True)


@form("layer_norm")
def layer_norm(im: Importer, x: Item, shape: list[int], w: Item | None, b: Item | None, eps: float, *_: object) -> Item:
    dims = list(range(-len(shape), 0))
    x = im.values.plain(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    mean = im.values.plain(_mean(im, x, dims, wide))
    left = im.values.plain(im.apply("sub", x, mean, dtype=wide))
    scale = im.values.plain(_rstd(im, left, dims, eps, wide))
    return _affine(im, im.apply("mul", left, scale, dtype=wide), w, b)


@form("rms_norm _fused_rms_norm")
def rms_norm(im: Importer, x: Item, shape: list[int], w: Item | None, eps: float | None) -> Item | list[Item]:
    assert im.eqn is not None
    x = im.values.plain(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = im.values.plain(
        _rstd(im, x, list(range(-len(shape), 0)), torch.finfo(x.dtype).eps if eps is None else eps, wide)
    )
    y = _affine(im, im.apply("mul", x, scale, dtype=wide), w, None)
    return [y, scale] if im.eqn.many else y


def _mean(im: Importer, x: Item, dims: list[int], dtype: torch.dtype, keep: bool = True) -> Lazy:
    count = math.prod(im.values.lazy(x).shape[d] for d in dims) if dims else math.prod(im.values.lazy(x).shape)
    return im.apply("div", im.reduce("sum", x, dims, keep, dtype), float(count), dtype=dtype)


def _rstd(im: Importer, x: Item, dims: list[int], eps: float, dtype: torch.dtype) -> Lazy:
    squares = _mean(im, im.apply("mul", x, x, dtype=dtype), dims, dtype)
    return im.apply("rsqrt", im.apply("add", squares, eps, dtype=dtype), dtype=dtype)


def _affine(im: Importer, y: Lazy, w: Item | None, b: Item | None) -> Lazy:
    y = y if w is None else im.apply("mul", y, w)
    return y if b is None else im.apply("add", y, b)


@form("sum")
def total(
    im: Importer, x: Item, dims: list[int] | None = None, keepdim: bool = False, dtype: object = None,
    output_dtype: object = None,
) -> Item:  # fmt: skip
    assert im.eqn is not None
    return im.reduce("sum", im.values.cast(x, im.eqn.results()[0].dtype), _dims(im, x, dims), keepdim)


@form("mean")
def mean(im: Importer, x: Item, dims: list[int] | None = None, keepdim: bool = False, dtype: object = None) -> Item:
    assert im.eqn is not None
    wide = torch.promote_types(im.eqn.results()[0].dtype, torch.float32)
    return _mean(im, im.values.cast(x, wide), _dims(im, x, dims), wide, keepdim)


@form("amax")
def amax(im: Importer, x: Item, dims: list[int] | None = None, keepdim: bool = False) -> Item:
    return im.reduce("max", x, _dims(im, x, dims), keepdim)


@form("amin")
def amin(im: Importer, x: Item, dims: list[int] | None = None, keepdim: bool = False) -> Item:
    return im.reduce("min", x, _dims(im, x, dims), keepdim)


@form("argmax argmin")
def argmax(im: Importer, x: Item, dim: int | None = None, keepdim: bool = False) -> Item:
    assert im.eqn is not None
    return im.reduce(im.eqn.opname, x, _dims(im, x, dim), keepdim, torch.int64)


@form("topk")
def topk(im: Importer, x: Item, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> list[Item]:
    """The largest of a row, then the largest of what is left."""
    x = im.values.plain(x)
    if not largest or k > TOP or dim % max(len(x.shape), 1) != len(x.shape) - 1:
        return NotImplemented
    places = Known(torch.arange(x.shape[-1]).expand(x.shape), "places")
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    at = im.reduce("argmax", x, [-1], True, torch.int64)
    pairs = [(im.reduce("max", x, [-1], True, x.dtype), at)]
    taken = im.values.plain(im.apply("eq", places, at, dtype=torch.bool))
    while len(pairs) < k:
        left = im.values.plain(im.apply("where", taken, lowest, x, dtype=x.dtype))
        top = im.reduce("max", left, [-1], True, x.dtype)
        at = im.reduce("argmax", _free(im, left, top, taken), [-1], True, torch.int64)
        pairs.append((top, at))
        here = im.values.plain(im.apply("eq", places, at, dtype=torch.bool))
        taken = im.values.plain(im.apply("maximum", taken, here, dtype=torch.bool))
    both = (concatenated([im.values.map(pair[i]) for pair in pairs], len(x.shape) - 1) for i in range(2))
    dtypes = (x.dtype, torch.int64)
    return [Lazy(m.shape, d, 0, (m,), im.name(), pairs[0][0].source) for m, d in zip(both, dtypes, strict=True)]


def _free(im: Importer, left: Lazy, top: Lazy, taken: Lazy) -> Lazy:
    """1 where the largest of what is left stands, or what is no number. What was taken is as low as can be, and so may
    others be: hence it is left out by name."""
    wide = torch.float32
    same, no_number = im.apply("eq", left, top, dtype=wide), im.apply("ne", left, left, dtype=wide)
    hit = im.values.plain(im.apply("maximum", same, no_number, dtype=wide))
    return im.values.plain(im.apply("where", taken, 0.0, hit, dtype=wide))


def _dims(im: Importer, x: Item, dims: list[int] | int | None) -> list[int]:
    count = len(im.values.lazy(x).shape)
    if dims is None or dims == []:
        return list(range(count))
    return [dims] if isinstance(dims, int) else list(dims)


# --- rows chosen by data, windows ---


@form("embedding")
def embedding(im: Importer, table: Item, index: Item, *_: object) -> Item:
    return im.gather(table, index)


@form("index_select")
def index_select(im: Importer, x: Item, dim: int, index: Item) -> Item:
    return im.gather(x, index) if dim == 0 else NotImplemented


@form("index _unsafe_index")
def index(im: Importer, x: Item, indices: list[Item | None]) -> Item:
    """Rows; or any elements at places that are known and never others."""
    if all(i is None or isinstance(i, Known) and not i.varies for i in indices):
        places = tuple(slice(None) if i is None else i.data for i in indices)  # type: ignore[union-attr]
        return im.relaid(x, lambda t: chosen(t, places, im.graph.homes))
    if len(indices) != 1 or indices[0] is None or im.values.lazy(indices[0]).dtype == torch.bool:
        return NotImplemented
    return im.gather(x, im.wrapped(indices[0], im.values.lazy(x).shape[0]))


@form("index_put")
def index_put(im: Importer, x: Item, indices: list[Item | None], rows: Item, accumulate: bool = False) -> Item:
    places = [d for d, i in enumerate(indices) if i is not None]
    if len(places) != 1 or accumulate or not isinstance(x, Lazy):
        return NotImplemented
    index, dim = indices[places[0]], places[0]
    if index is None or im.values.lazy(index).dtype == torch.bool:
        return NotImplemented
    return im.scattered(x, dim, im.wrapped(index, x.shape[dim]), rows)


@form("index_copy")
def index_copy(im: Importer, x: Item, dim: int, index: Item, rows: Item) -> Item:
    return im.scattered(x, dim, index, rows) if isinstance(x, Lazy) else NotImplemented


@form("var var_mean")
def variance(im: Importer, x: Item, dims: list[int] | None = None, correction: float | None = None,
             keepdim: bool = False) -> Item | list[Item]:  # fmt: skip
    """The mean square of what is left after the mean; `unbiased` of the older overloads is a correction of 1."""
    assert im.eqn is not None
    if isinstance(correction, bool) or correction is None:
        correction = 1 if correction is None or correction else 0
    dims = _dims(im, x, dims)
    x = im.values.plain(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    middle = im.values.plain(_mean(im, x, dims, wide))
    left = im.values.plain(im.apply("sub", x, middle, dtype=wide))
    count = math.prod(x.shape[d] for d in dims)
    squares = im.reduce("sum", im.apply("mul", left, left, dtype=wide), dims, keepdim, wide)
    result = im.apply("div", squares, float(max(count - correction, 0)), dtype=wide)
    if im.eqn.opname == "var":
        return result
    both: list[Item] = [result, _viewed(middle, sizes(im.eqn.results()[-1]))]
    return both


@form("log_softmax _log_softmax")
def log_softmax(im: Importer, x: Item, dim: int, option: object = None) -> Item:
    x = im.values.plain(im.values.cast(x, option) if isinstance(option, torch.dtype) else x)
    wide = torch.promote_types(x.dtype, torch.float32)
    left = im.values.plain(im.apply("sub", x, im.reduce("max", x, [dim], True, wide), dtype=wide))
    total = im.reduce("sum", im.apply("exp", left, dtype=wide), [dim], True, wide)
    return im.apply("sub", left, im.apply("log", total, dtype=wide), dtype=wide)
