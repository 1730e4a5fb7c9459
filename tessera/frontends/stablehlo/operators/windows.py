"""Windows that slide: reduce_window and select_and_scatter, and the view of all windows that both use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from tessera.frontends.stablehlo.elements import ELEMENTS
from tessera.frontends.stablehlo.operators import bodies
from tessera.frontends.stablehlo.operators.indexing import combined
from tessera.frontends.stablehlo.operators.reductions import neutral, reduced
from tessera.frontends.stablehlo.operators.shapes import cut, padded
from tessera.frontends.stablehlo.registry import Site, meaning
from tessera.frontends.stablehlo.values import Splat, Value, tensor_of
from tessera.ir.types import SYMBOLIC

FEW = 16  # elements of a window that are gone through one by one


def windows(x: torch.Tensor, size: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> torch.Tensor:
    """(places…, window…), a view: the same element may stand in many windows."""
    for dim, (n, step, gap) in enumerate(zip(size, strides, dilation, strict=True)):
        whole = (n - 1) * gap + 1
        x = x.unfold(dim, whole, step) if x.shape[dim] >= whole else _none(x, dim, whole)
        if gap > 1:
            x = x[..., ::gap]
    return x


def _none(x: torch.Tensor, dim: int, whole: int) -> torch.Tensor:
    """No window fits."""
    shape = list(x.shape)
    shape[dim] = 0
    return x.new_empty((*shape, whole))


@meaning("reduce_window", raw=True, storage=True)
def reduce_window(site: Site, *operands: Value) -> list[Value]:
    count = len(operands) // 2
    xs, inits = [tensor_of(x, site.device) for x in operands[:count]], operands[count:]
    rank = xs[0].ndim
    size, ones = site["window_dimensions"], [1] * rank
    strides, base_dilation = site.get("window_strides") or ones, site.get("base_dilations") or ones
    dilation, padding = site.get("window_dilations") or ones, site.get("padding") or [[0, 0]] * rank
    if rank == 0:
        return reduced(site, xs, inits, [])
    low, high = ([p[i] for p in padding] for i in (0, 1))
    between = [s - 1 for s in base_dilation]
    if not any(isinstance(n, SYMBOLIC) for n in size) and math.prod(size) <= FEW and bodies.vectorises(site.region()):
        wide = [padded(site, x, init, low, high, between) for x, init in zip(xs, inits, strict=True)]
        return _in_order(site, wide, inits, size, strides, dilation)
    if (
        count == 1
        and (out := _running(site, xs[0], inits[0], size, strides, base_dilation, dilation, padding)) is not None
    ):
        return [out]
    views = [
        windows(padded(site, x, init, low, high, between), size, strides, dilation)
        for x, init in zip(xs, inits, strict=True)
    ]
    return reduced(site, views, inits, list(range(rank, 2 * rank)))


def _in_order(
    site: Site, xs: Sequence[torch.Tensor], inits: Sequence[Value], size: Sequence[int], strides: Sequence[int],
    dilation: Sequence[int],
) -> list[Value]:  # fmt: skip
    """The first element of all windows, then the second of all, and so on: slices, which fuse."""
    body = bodies.over_elements(site)
    places = [
        torch.sym_max((x.shape[d] - (n - 1) * gap - 1) // step + 1, 0)
        for x in xs[:1] for d, (n, step, gap) in enumerate(zip(size, strides, dilation, strict=True))
    ]  # fmt: skip
    out = [tensor_of(i, site.device).expand(places) for i in inits]
    for offset in itertools.product(*map(range, size)):
        begin = [o * gap for o, gap in zip(offset, dilation, strict=True)]
        end = [torch.sym_max(b + (p - 1) * step + 1, 0) for b, p, step in zip(begin, places, strides, strict=True)]
        out = body(*out, *(cut(x, begin, end, strides) for x in xs))
    return list(out)


_RUNNING = {
    "add": torch.cumsum,
    "multiply": torch.cumprod,
    "maximum": lambda x, d: torch.cummax(x, d)[0],
    "minimum": lambda x, d: torch.cummin(x, d)[0],
}


def _running(
    site: Site, x: torch.Tensor, init: Value, size: Sequence[int], strides: Sequence[int], base_dilation: Sequence[int],
    dilation: Sequence[int], padding: Sequence[Sequence[int]],
) -> torch.Tensor | None:  # fmt: skip
    """A window over all elements up to one, or from one on: a cumulative sum, product, maximum or minimum."""
    element = site.element
    wide = [d for d, n in enumerate(size) if n != 1]
    name = bodies.kind(site.region())
    if len(wide) != 1 or name not in _RUNNING or any(n != 1 for n in (*strides, *base_dilation, *dilation)):
        return None
    dim = wide[0]
    n = x.shape[dim]
    if size[dim] != n or any(any(p) for d, p in enumerate(padding) if d != dim):
        return None
    plain = (element.integer or element.floating) and not element.unsigned64
    if not plain or not isinstance(init, Splat) or not neutral(name, init):
        return None
    if name == "add" and element.integer or name == "multiply" and element.integer:
        run = lambda v, d: _RUNNING[name](v, d, dtype=v.dtype)  # noqa: E731
    else:
        run = _RUNNING[name]
    if list(padding[dim]) == [n - 1, 0]:
        return element.wrap(run(x, dim))
    if list(padding[dim]) == [0, n - 1]:
        return element.wrap(run(x.flip(dim), dim).flip(dim))
    return None


@meaning("select_and_scatter", raw=True, storage=True)
def select_and_scatter(site: Site, x: Value, source: Value, init: Value) -> Value:
    """Of every window one element is selected; what stands in `source` for the window is scattered to its place."""
    tensor, updates = tensor_of(x, site.device), tensor_of(source, site.device)
    rank = tensor.ndim
    ones = [1] * rank
    size, strides = site.get("window_dimensions") or ones, site.get("window_strides") or ones
    padding = site.get("padding") or [[0, 0]] * rank
    low, high = ([p[i] for p in padding] for i in (0, 1))
    count = math.prod(size)
    places = torch.arange(tensor.numel(), device=site.device).reshape(tensor.shape)
    nowhere = Splat(-1, (), ELEMENTS["i64"])
    seen = windows(padded(site, places, nowhere, low, high, [0] * rank), size, strides, ones)
    values = windows(padded(site, tensor, Splat(0, (), site.element), low, high, [0] * rank), size, strides, ones)
    seen = seen.reshape(*seen.shape[:rank], count).movedim(-1, 0)
    values = values.reshape(*values.shape[:rank], count).movedim(-1, 0)
    chosen = _selected(site, values, seen)
    result = tensor_of(init, site.device).expand(tensor.numel())
    index = torch.where(chosen < 0, tensor.numel(), chosen).reshape(-1)
    (out,) = combined(site, 1, [result], index, [updates.reshape(-1)], unique=False)
    return out.reshape(tensor.shape)


def _selected(site: Site, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """The place of each window's element: one stays selected as long as the body holds for it and the next."""
    select = bodies.over_elements(site, 0)
    best, place = values[0], seen[0]
    for k in range(1, values.shape[0]):
        (stays,) = select(best, values[k])
        there = seen[k] >= 0
        take = there & ((place < 0) | ~stays)
        best, place = torch.where(take, values[k], best), torch.where(take, seen[k], place)
    return place
