"""Kernels that many tests of the tile compiler share, written with the builder. Sizes are symbols."""

from __future__ import annotations

from xdsl.ir import Attribute

from tessera.tile.dialect.build import KernelBuilder, bf16, f32, f64
from tessera.tile.dialect.ops import KernelOp


def pointwise(name: str = "silu_add", element: Attribute = f32) -> KernelOp:
    """silu(x + y) over (n, m); y has m elements."""
    k = KernelBuilder(name, symbols=["n", "m"])
    i, j = k.axis("i", "n"), k.axis("j", "m")
    x, y, out = k.buffer(element), k.buffer(element), k.buffer(element)
    wide = f64 if element == f64 else f32
    at = i * k.symbol("m") + j
    s = k.apply("add", k.cast(k.load(x, at), wide), k.cast(k.load(y, j), wide))
    k.store(k.cast(k.apply("mul", s, k.apply("sigmoid", s)), element), out, at)
    return k.finish()


def softmax(element: Attribute = f32) -> KernelOp:
    """Softmax of the rows of (n, m)."""
    k = KernelBuilder("softmax", symbols=["n", "m"])
    i, r = k.axis("i", "n"), k.axis("r", "m", reduce=True)
    x, out = k.buffer(element), k.buffer(element)
    at = i * k.symbol("m") + r
    a = k.cast(k.load(x, at), f32)
    e = k.apply("exp", k.apply("sub", a, k.reduce("max", a, "r")))
    k.store(k.cast(k.apply("div", e, k.reduce("sum", e, "r")), element), out, at)
    return k.finish()


def rms_norm(element: Attribute = bf16) -> KernelOp:
    """x / sqrt(mean(x²) + 1e-5) * w over the rows of (n, m)."""
    k = KernelBuilder("rms_norm", symbols=["n", "m"])
    i, r = k.axis("i", "n"), k.axis("r", "m", reduce=True)
    x, w, out = k.buffer(element), k.buffer(element), k.buffer(element)
    at = i * k.symbol("m") + r
    a = k.cast(k.load(x, at), f32)
    mean = k.apply("div", k.reduce("sum", k.apply("mul", a, a), "r"), k.cast(k.iota(k.symbol("m")), f32))
    scale = k.apply("rsqrt", k.apply("add", mean, k.constant(1e-5, f32)))
    y = k.apply("mul", k.apply("mul", a, scale), k.cast(k.load(w, r), f32))
    k.store(k.cast(y, element), out, at)
    return k.finish()


def matmul(element: Attribute = bf16) -> KernelOp:
    """relu((m, k) @ (k, n) + bias)."""
    k = KernelBuilder("matmul", symbols=["m", "n", "k"])
    i, j, r = k.axis("i", "m"), k.axis("j", "n"), k.axis("r", "k", reduce=True)
    a, b, bias, out = (k.buffer(element) for _ in range(4))
    n, depth = k.symbol("n"), k.symbol("k")
    c = k.contract(k.load(a, i * depth + r), k.load(b, r * n + j), "r")
    c = k.apply("add", c, k.cast(k.load(bias, j), f32))
    k.store(k.cast(k.apply("maximum", c, k.constant(0.0, f32)), element), out, i * n + j)
    return k.finish()


def attention(rows: int, keys: int, width: int) -> KernelOp:
    """One head without a mask, in f32: softmax(q @ k.T / sqrt(width)) @ v."""
    k = KernelBuilder("attention")
    i, c = k.axis("i", rows), k.axis("c", width)
    r, d = k.axis("r", keys, reduce=True), k.axis("d", width, reduce=True)
    q, key, v, out = (k.buffer(f32) for _ in range(4))
    score = k.contract(k.load(q, i * width + d), k.load(key, r * width + d), "d")
    score = k.apply("mul", score, k.constant(width**-0.5, f32))
    e = k.apply("exp", k.apply("sub", score, k.reduce("max", score, "r")))
    p = k.apply("div", e, k.reduce("sum", e, "r"))
    k.store(k.contract(p, k.load(v, r * width + c), "r"), out, i * width + c)
    return k.finish()
