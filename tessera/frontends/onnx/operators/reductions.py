"""Sums, products, extrema and their places, over some axes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.frontends.onnx.operators.unsigned import wide
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import number, numbers

Tensor = torch.Tensor


def _product(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keepdims, dtype=x.dtype)
    return x


def _sum(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keepdims, dtype=x.dtype)


def _mean(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    if not x.is_floating_point():
        return torch.mean(x.double(), axes, keepdim=keepdims).to(x.dtype)
    return torch.mean(x, axes, keepdim=keepdims)


def _extreme(fn: Callable, largest: bool) -> Callable:
    def run(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
        if any(type(x.shape[a]) is int and x.shape[a] == 0 for a in axes):
            shape = list(x.shape)
            for a in axes:
                shape[a] = 1
            empty = torch.full(shape, _neutral(x.dtype, largest), dtype=x.dtype, device=x.device)
            return empty if keepdims else empty.squeeze(tuple(axes))
        if x.dtype == torch.bool:
            return fn(x.to(torch.uint8), axes, keepdim=keepdims).to(torch.bool)
        return fn(x, axes, keepdim=keepdims)

    return run


def _neutral(dtype: torch.dtype, largest: bool) -> float | int | bool:
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _wider(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.double()


def _log_sum_exp(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    return torch.logsumexp(_wider(x), axes, keepdim=keepdims).to(x.dtype)


_KINDS: dict[str, Callable] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceProd": _product,
    "ReduceMax": _extreme(torch.amax, True),
    "ReduceMin": _extreme(torch.amin, False),
    "ReduceL1": lambda x, axes, keepdims: _sum(x.abs(), axes, keepdims),
    "ReduceL2": lambda x, axes, keepdims: torch.sqrt(_sum(_wider(x) * _wider(x), axes, keepdims)).to(x.dtype),
    "ReduceSumSquare": lambda x, axes, keepdims: _sum(x * x, axes, keepdims),
    "ReduceLogSum": lambda x, axes, keepdims: torch.log(_sum(_wider(x), axes, keepdims)).to(x.dtype),
    "ReduceLogSumExp": _log_sum_exp,
}


def _declare(name: str, fn: Callable, moved: int) -> None:
    """Axes are an attribute until the opset `moved`, then an input."""
    run = wide(fn)

    @operator(name, moved, sizes=(1,))
    def by_input(x: Tensor, axes: Tensor | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        listed = [] if axes is None else numbers(axes)
        if not listed and noop_with_empty_axes:
            # Nothing is summed; what is done to each element still is.
            return (
                fn(x.unsqueeze(0), [0], False) if name not in ("ReduceSum", "ReduceMean", "ReduceProd") else x.clone()
            )
        return run(x, listed or list(range(x.ndim)), bool(keepdims)) if x.ndim else run(x.unsqueeze(0), [0], False)

    @operator(name, 1, moved - 1)
    def by_attribute(x: Tensor, *, axes: list[int] | None = None, keepdims: int = 1) -> Tensor:
        return run(x, axes or list(range(x.ndim)), bool(keepdims)) if x.ndim else run(x.unsqueeze(0), [0], False)


for _name, _fn in _KINDS.items():
    _declare(_name, _fn, 13 if _name == "ReduceSum" else 18)


def _place(x: Tensor, axis: int, keepdims: int, last: int, largest: bool) -> Tensor:
    """The place of an extreme; of equal ones the first, or the last."""
    find = torch.argmax if largest else torch.argmin
    if x.ndim == 0:
        x, axis, keepdims = x.unsqueeze(0), 0, 0
    if not last:
        return find(x, axis, keepdim=bool(keepdims))
    return x.shape[axis] - 1 - find(x.flip(axis), axis, keepdim=bool(keepdims))


@operator("ArgMax")
def arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return _place(x, axis, keepdims, select_last_index, True)


@operator("ArgMin")
def arg_min(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return _place(x, axis, keepdims, select_last_index, False)


def _cumulative(x: Tensor, axis: Tensor, exclusive: int, reverse: int, fn: Callable, neutral: int) -> Tensor:
    dim = int(number(axis))
    if reverse:
        x = x.flip(dim)
    if exclusive:
        x = torch.cat([torch.full_like(x.narrow(dim, 0, 1), neutral), x.narrow(dim, 0, x.shape[dim] - 1)], dim)
    out = fn(x, dim, dtype=x.dtype)
    return out.flip(dim) if reverse else out


@operator("CumSum", 11, sizes=(1,))
def cum_sum(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    return _cumulative(x, axis, exclusive, reverse, torch.cumsum, 0)


@operator("CumProd", 26, sizes=(1,))
def cum_prod(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    return _cumulative(x, axis, exclusive, reverse, torch.cumprod, 1)


@operator("TopK", 10, sizes=(1,))
def top_k(x: Tensor, k: Tensor, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    return _top(x, int(number(k)), axis, bool(largest))


@operator("TopK", 1, 9)
def top_k_by_attribute(x: Tensor, *, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    return _top(x, k, axis, True)


def _top(x: Tensor, k: int, axis: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Of equal elements those that come first; `torch.topk` promises nothing of that."""
    values, places = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, k), places.narrow(axis, 0, k)
