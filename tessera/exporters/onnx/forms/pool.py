"""Pooling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.forms.layers import listed
from tessera.exporters.onnx.graph import Graph, Ref, same
from tessera.exporters.onnx.registry import form
from tessera.ir.types import Size


def batched(g: Graph, x: Ref, spatial: int, write: Callable[[Ref], list[Ref]]) -> list[Ref]:
    """An image without a batch is a batch of one."""
    need(x.is_float and not any(same(n, 0) for n in x.sizes))
    if x.dtype in (torch.float16, torch.bfloat16):  # what runtimes have no pools of
        x = g.cast(x, torch.float32)
    if x.ndim == spatial + 2:
        return write(x)
    return [g.op("Squeeze", out, g.ints([0])) for out in write(g.unsqueeze(x, 0))]


def max_pool(
    g: Graph, x: Ref, n: int, kernel: Sequence[int], stride: object, padding: object, dilation: object, ceil: bool,
    places: bool,
) -> list[Ref]:  # fmt: skip
    sizes = listed(kernel, n)
    about = {
        "kernel_shape": sizes,
        "strides": listed(stride, n) if stride else sizes,
        "pads": listed(padding, n) * 2,
        "dilations": listed(dilation, n),
        "ceil_mode": int(ceil),
    }
    need(not places or all(isinstance(s, int) for s in x.sizes[-n:]))

    def write(x: Ref) -> list[Ref]:
        if not places:
            return [g.op("MaxPool", x, **about)]
        values, indices = g.op("MaxPool", x, outputs=2, dtype=[x.dtype, torch.int64], **about)
        plane = 1
        for s in x.sizes[-n:]:
            plane *= s  # type: ignore[assignment]
        return [values, g.op("Mod", indices, g.full(plane, torch.int64))]  # ONNX counts through the whole tensor

    return batched(g, x, n, write)


def _declare_max(n: int) -> None:
    @form(f"max_pool{n}d")
    def values(
        g: Graph, x: Ref, kernel: Sequence[int], stride: object = (), padding: object = 0, dilation: object = 1,
        ceil: bool = False,
    ) -> Ref:  # fmt: skip
        return max_pool(g, x, n, kernel, stride, padding, dilation, ceil, False)[0]

    @form(f"max_pool{n}d_with_indices")
    def with_places(
        g: Graph, x: Ref, kernel: Sequence[int], stride: object = (), padding: object = 0, dilation: object = 1,
        ceil: bool = False,
    ) -> list[Ref | None]:  # fmt: skip
        wanted = g.results[1] is not None
        out = max_pool(g, x, n, kernel, stride, padding, dilation, ceil, wanted)
        return [*out, *([] if wanted else [None])]

    @form(f"avg_pool{n}d")
    def average(
        g: Graph, x: Ref, kernel: Sequence[int], stride: object = (), padding: object = 0, ceil: bool = False,
        count_pad: bool = True, divisor: int | None = None,
    ) -> Ref:  # fmt: skip
        sizes = listed(kernel, n)
        if divisor is not None and ceil:  # zeros behind the image, so that the last windows are whole
            x, ceil = reached(g, x, sizes, listed(stride, n) if stride else sizes, listed(padding, n)), False
        about = {
            "kernel_shape": sizes,
            "strides": listed(stride, n) if stride else sizes,
            "pads": listed(padding, n) * 2,
            "ceil_mode": int(ceil),
            "count_include_pad": int(count_pad or divisor is not None),
        }
        out = batched(g, x, n, lambda x: [g.op("AveragePool", x, **about)])[0]
        return out if divisor is None else g.op("Mul", out, g.full(math.prod(sizes) / divisor, x.dtype))

    @form(f"adaptive_avg_pool{n}d _adaptive_avg_pool{n}d")
    def adaptive_average(g: Graph, x: Ref, target: Sequence[int]) -> Ref:
        wanted = listed(target, n)
        if all(t == 1 for t in wanted):
            return g.reduce("ReduceMean", x, list(range(x.ndim - n, x.ndim)), True)
        sizes = evenly(x, wanted)
        if sizes is None:
            return mixed(g, x, wanted)
        return batched(g, x, n, lambda x: [g.op("AveragePool", x, kernel_shape=sizes, strides=sizes)])[0]

    @form(f"adaptive_max_pool{n}d")
    def adaptive_max(g: Graph, x: Ref, target: Sequence[int]) -> list[Ref | None]:
        sizes = evenly(x, listed(target, n))
        wanted = g.results[1] is not None
        if sizes is None:
            need(not wanted)
            return [largest(g, x, listed(target, n)), None]
        out = max_pool(g, x, n, sizes, sizes, 0, 1, False, wanted)
        return [*out, *([] if wanted else [None])]


def reached(g: Graph, x: Ref, kernel: list[int], stride: list[int], padding: list[int]) -> Ref:
    """With zeros at the end up to where the last window ends."""
    n = len(kernel)
    need(all(isinstance(size, int) for size in x.sizes[-n:]))
    ends = [
        max((out - 1) * s + k - 2 * p - size, 0)  # type: ignore[operator]
        for out, size, k, s, p in zip(g.result.shape[-n:], x.sizes[-n:], kernel, stride, padding, strict=True)
    ]
    pads = [0] * x.ndim + [0] * (x.ndim - n) + ends
    shape = [*x.sizes[:-n], *(size + end for size, end in zip(x.sizes[-n:], ends, strict=True))]
    return g.op("Pad", x, g.ints(pads), shape=shape)


def evenly(x: Ref, target: list[int]) -> list[int] | None:
    """The kernel of windows that share the input evenly, if there is one that is known."""
    pairs = list(zip(x.sizes[-len(target) :], target, strict=True))
    need(not any(same(n, 0) or t == 0 for n, t in pairs))
    if any(not isinstance(n, int) or n % t for n, t in pairs):
        return None
    return [n // t for n, t in pairs]  # type: ignore[operator]


def windows(size: int, count: int) -> list[range]:
    """Where PyTorch's adaptive windows lie."""
    return [range(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def mixed(g: Graph, x: Ref, target: list[int]) -> Ref:
    """Averages over uneven windows are a product with a matrix, along one dimension after the other."""
    for d, count in enumerate(target, x.ndim - len(target)):
        order = [i for i in range(x.ndim) if i != d] + [d]
        turned = g.permute(x, order)
        out = g.op("MatMul", turned, shares(g, x.sizes[d], count, x.dtype), shape=[*turned.sizes[:-1], count])
        x = g.permute(out, [order.index(i) for i in range(x.ndim)])
    return x


def shares(g: Graph, size: Size, count: int, dtype: torch.dtype) -> Ref:
    """[size, count]: how much of each element every window's average has."""
    if isinstance(size, int):
        matrix = torch.zeros(size, count, dtype=dtype)
        for i, window in enumerate(windows(size, count)):
            matrix[window.start : window.stop, i] = 1 / len(window)
        return g.tensor(matrix)
    starts, ends, inside = open_windows(g, size, count)
    return g.op("Div", g.cast(inside, dtype), g.cast(g.op("Sub", ends, starts), dtype))


def open_windows(g: Graph, size: Size, count: int) -> list[Ref]:
    """Where windows over an open size begin and end, and [size, count]: whether an element is in a window."""
    n, whole = g.scalar(size, torch.int64), g.full(count, torch.int64)
    starts = g.op("Div", g.op("Mul", g.tensor(torch.arange(count)), n), whole)
    upper = g.op("Add", g.op("Mul", g.tensor(torch.arange(1, count + 1)), n), g.full(count - 1, torch.int64))
    ends = g.op("Div", upper, whole)
    place = g.unsqueeze(g.op("Range", g.full(0, torch.int64), n, g.full(1, torch.int64), shape=[size]), 1)
    above = g.op("GreaterOrEqual", place, starts, dtype=torch.bool)
    return [starts, ends, g.op("And", above, g.op("Less", place, ends, dtype=torch.bool))]


def largest(g: Graph, x: Ref, target: list[int]) -> Ref:
    """Maxima over uneven windows, along one dimension after the other; short windows count an element twice."""
    for d, count in enumerate(target, x.ndim - len(target)):
        size = x.sizes[d]
        if not isinstance(size, int):
            order = [i for i in range(x.ndim) if i != d] + [d]
            turned = g.permute(x, order)
            inside = g.op("Transpose", open_windows(g, size, count)[2], perm=[1, 0], shape=[count, size])
            least = g.full(-math.inf if x.is_float else torch.iinfo(x.dtype).min, x.dtype)
            rows = g.op("Where", inside, g.unsqueeze(turned, -2), least, dtype=x.dtype)
            out = g.reduce("ReduceMax", rows, [x.ndim], False)
            x = g.permute(out, [order.index(i) for i in range(x.ndim)])
            continue
        spans = windows(size, count)
        longest = max(map(len, spans))
        places = torch.tensor([[min(w.start + i, w.stop - 1) for i in range(longest)] for w in spans])
        shape = [*x.sizes[:d], count, *x.sizes[d + 1 :]]
        out = g.reduce("ReduceMax", g.op("Gather", x, g.tensor(places), axis=d), [d + 1], False)
        x = Ref(out.name, out.dtype, tuple(shape))
    return x


for _n in (1, 2, 3):
    _declare_max(_n)
