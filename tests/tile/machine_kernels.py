"""Kernels of every kind that schedules are proposed for, without tensors: any size costs the same to write down.

`KERNELS[name](sizes)` gives the kernel with literal sizes; `LARGE` are sizes as models have them, `SMALL` ones that the
interpreter runs in no time.
"""

from __future__ import annotations

from collections.abc import Callable

from xdsl.ir import Attribute

from tessera.tile.attention import Attention, attention, attention_parts
from tessera.tile.dialect.build import KernelBuilder, bf16, f32
from tessera.tile.dialect.ops import KernelOp


def pointwise(n: int, element: Attribute = bf16) -> KernelOp:
    """relu(x * 2 + y)."""
    k = KernelBuilder("pointwise")
    i = k.axis("i", n)
    x, y, z = (k.buffer(element) for _ in range(3))
    doubled = k.apply("mul", k.cast(k.load(x, i), f32), k.constant(2.0, f32))
    total = k.apply("add", doubled, k.cast(k.load(y, i), f32))
    k.store(k.cast(k.apply("maximum", total, k.constant(0.0, f32)), element), z, i)
    return k.finish()


def transpose(n: int, m: int, element: Attribute = bf16) -> KernelOp:
    k = KernelBuilder("transpose")
    i, j = k.axis("i", m), k.axis("j", n)
    x, y = k.buffer(element), k.buffer(element)
    k.store(k.load(x, j * m + i), y, i * n + j)
    return k.finish()


def row_sum(n: int, m: int, element: Attribute = bf16) -> KernelOp:
    k = KernelBuilder("row_sum")
    i, r = k.axis("i", n), k.axis("r", m, reduce=True)
    x, y = k.buffer(element), k.buffer(f32)
    k.store(k.reduce("sum", k.cast(k.load(x, i * m + r), f32), "r"), y, i)
    return k.finish()


def softmax(n: int, m: int, element: Attribute = bf16) -> KernelOp:
    k = KernelBuilder("softmax")
    i, r = k.axis("i", n), k.axis("r", m, reduce=True)
    x, y = k.buffer(element), k.buffer(element)
    value = k.cast(k.load(x, i * m + r), f32)
    exponential = k.apply("exp", k.apply("sub", value, k.reduce("max", value, "r")))
    k.store(k.cast(k.apply("div", exponential, k.reduce("sum", exponential, "r")), element), y, i * m + r)
    return k.finish()


def norm_backward(n: int, m: int, element: Attribute = bf16) -> KernelOp:
    """Of an RMS norm: the argument's gradient row by row, the weight's summed over the rows."""
    k = KernelBuilder("norm_backward")
    i, r = k.axis("i", n), k.axis("r", m, reduce=True)
    bg, bx, bw, bs, bdx, bdw = (k.buffer(e) for e in (element, element, element, f32, element, f32))
    g, x, w = (k.cast(k.load(b, at), f32) for b, at in ((bg, i * m + r), (bx, i * m + r), (bw, r)))
    unit = k.apply("mul", x, k.load(bs, i))
    inner = k.apply("mul", g, w)
    mean = k.apply("div", k.reduce("sum", k.apply("mul", inner, unit), "r"), k.constant(m, f32))
    left = k.apply("sub", inner, k.apply("mul", unit, mean))
    k.store(k.cast(k.apply("mul", left, k.load(bs, i)), element), bdx, i * m + r)
    k.store(k.reduce("sum", k.apply("mul", g, unit), "i"), bdw, r)
    return k.finish()


def column_sum(n: int, m: int, element: Attribute = bf16, loads: int = 1) -> KernelOp:
    k = KernelBuilder("column_sum")
    r, j = k.axis("r", n, reduce=True), k.axis("j", m)
    values = [k.cast(k.load(k.buffer(element), r * m + j), f32) for _ in range(loads)]
    total = values[0]
    for value in values[1:]:
        total = k.apply("mul", total, value)
    k.store(k.reduce("sum", total, "r"), k.buffer(f32), j)
    return k.finish()


def running_sum(n: int, m: int, element: Attribute = bf16) -> KernelOp:
    """Down columns."""
    k = KernelBuilder("running_sum")
    j, r = k.axis("j", m), k.axis("r", n, reduce=True)
    x, y = k.buffer(element), k.buffer(f32)
    k.store(k.scan("sum", k.cast(k.load(x, r * m + j), f32), "r"), y, r * m + j)
    return k.finish()


def product(m: int, n: int, p: int, element: Attribute = bf16) -> KernelOp:
    """relu(x @ w.T + bias)."""
    k = KernelBuilder("product")
    i, j, r = k.axis("i", m), k.axis("j", n), k.axis("r", p, reduce=True)
    x, w, b, y = (k.buffer(element) for _ in range(4))
    total = k.contract(k.load(x, i * p + r), k.load(w, j * p + r), "r")
    total = k.apply("add", total, k.cast(k.load(b, j), f32))
    k.store(k.cast(k.apply("maximum", total, k.constant(0.0, f32)), element), y, i * n + j)
    return k.finish()


def many_queries(width: int, element: Attribute = bf16) -> KernelOp:
    return attention(Attention(width, width, causal=True, scale=0.1, element=element))


def few_queries(width: int, element: Attribute = bf16) -> KernelOp:
    return attention_parts(Attention(width, width, group=4, queries=1, packed=True, scale=0.1, element=element), 8)


ROWS = ((16384, 512), (4096, 4096), (2048, 8192), (4096, 16384), (2048, 32000), (2048, 32768), (1024, 65536),
        (512, 128256), (8, 128256), (4, 1 << 20))  # fmt: skip
COLUMNS = ((16384, 8192), (4, 1 << 20), (2048, 64), (100000, 16), (128, 1024))
LARGE: dict[Callable[..., KernelOp], tuple[tuple[int, ...], ...]] = {
    pointwise: ((1000,), (1 << 17,), (1 << 24,)),
    transpose: ((4096, 4096), (100, 12)),
    row_sum: ROWS,
    softmax: ROWS,
    norm_backward: ROWS[:7],
    column_sum: COLUMNS,
    running_sum: ((4096, 64), (128, 8), (100000, 3)),
    product: ((8192, 8192, 8192), (4096, 1024, 768), (256, 256, 16384), (128, 4096, 4096), (20, 512, 512)),
    many_queries: ((64,), (128,), (256,)),
    few_queries: ((64,), (128,), (256,)),
}


def sizes_of(kernel: KernelOp) -> dict[str, int]:
    """Of attention, whose sizes and strides are symbols."""
    return dict.fromkeys([s.data for s in kernel.symbol_names], 4096)
