"""Hand-built tile kernels with their inputs and expected results, shared by the tests of every target.

A `Case` is one kernel at one size. `expected` maps the number of a buffer to what it must hold afterwards; every other
buffer must be left as it was. Each maker takes `dynamic`: sizes are then symbols of the kernel instead of literals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from xdsl.ir import Attribute, SSAValue

from tessera.tile.dialect.build import KernelBuilder, bf16, f8, f8e5, f16, f32, f64, i1, i8, i16, i32, i64
from tessera.tile.dialect.index import Index, gathered
from tessera.tile.dialect.ops import KernelOp

ELEMENTS: dict[torch.dtype, Attribute] = {
    torch.float16: f16, torch.bfloat16: bf16, torch.float32: f32, torch.float64: f64, torch.bool: i1,
    torch.int8: i8, torch.int16: i16, torch.int32: i32, torch.int64: i64,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    kernel: KernelOp
    tensors: list[torch.Tensor]
    symbols: list[int]
    expected: dict[int, torch.Tensor]

    def check(self, results: list[torch.Tensor], slack: float = 1.0) -> None:
        """`results` are the tensors after the run."""
        for i, (before, after) in enumerate(zip(self.tensors, results, strict=True)):
            want = self.expected.get(i, before)
            rtol, atol = TOLERANCE.get(want.dtype, (0.0, 0.0)) if i in self.expected else (0.0, 0.0)
            after = after.cpu()
            if want.dtype.itemsize == 1 and want.dtype.is_floating_point:  # by its bits otherwise, those of NaN too
                after, want = after.float(), want.float()
            torch.testing.assert_close(
                after, want, rtol=rtol * slack, atol=atol * slack, equal_nan=True,
                msg=lambda text, i=i: f"{self.name}, buffer {i}: {text}",
            )  # fmt: skip


TOLERANCE = {
    torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1e-2),
    torch.float32: (2e-5, 2e-5), torch.float64: (1e-9, 1e-9),
}  # fmt: skip


class Sizes:
    """Sizes of one kernel: literals, or symbols whose values are collected in order."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic = dynamic
        self.names: list[str] = []
        self.values: list[int] = []

    def __call__(self, k: KernelBuilder, name: str, value: int) -> Index:
        if not self.dynamic:
            return Index.of(value)
        self.names.append(name)
        self.values.append(value)
        return k.symbol(name)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def up(k: KernelBuilder, v: SSAValue) -> SSAValue:
    """Narrow floats are computed with in f32."""
    return k.cast(v, f32) if v.type.element in (f16, bf16) else v  # type: ignore[attr-defined]


# --- elementwise ---


def pointwise(n: int = 1000, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> Case:
    """(x * 2 + y).relu() - 0.5 over one axis."""
    k, s, e = KernelBuilder("pointwise"), Sizes(dynamic), ELEMENTS[dtype]
    i = k.axis("i", s(k, "n", n))
    bx, by, bz = k.buffer(e), k.buffer(e), k.buffer(e)
    x, y = up(k, k.load(bx, i)), up(k, k.load(by, i))
    c = x.type.element  # type: ignore[attr-defined]
    z = k.apply("add", k.apply("mul", x, k.constant(2.0, c)), y)
    z = k.apply("sub", k.apply("maximum", z, k.constant(0.0, c)), k.constant(0.5, c))
    k.store(k.cast(z, e), bz, i)
    a, b = rand(n, dtype=dtype), rand(n, dtype=dtype, seed=1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    want = ((a.to(wide) * 2 + b.to(wide)).relu() - 0.5).to(dtype)
    return Case(f"pointwise-{n}", k.finish(), [a, b, torch.zeros_like(a)], s.values, {2: want})


def silu_mul(n: int = 9, m: int = 33, dtype: torch.dtype = torch.bfloat16, dynamic: bool = False) -> Case:
    """silu(x) * y where x and y are halves of one row: strides differ from the output's."""
    k, s, e = KernelBuilder("silu_mul"), Sizes(dynamic), ELEMENTS[dtype]
    N, M = s(k, "n", n), s(k, "m", m)
    i, j = k.axis("i", N), k.axis("j", M)
    bx, bz = k.buffer(e), k.buffer(e)
    x, y = up(k, k.load(bx, i * M * 2 + j)), up(k, k.load(bx, i * M * 2 + j + M))
    k.store(k.cast(k.apply("mul", k.apply("mul", x, k.apply("sigmoid", x)), y), e), bz, i * M + j)
    a = rand(n, 2 * m, dtype=dtype)
    want = (F.silu(a[:, :m].float()) * a[:, m:].float()).to(dtype)
    return Case(f"silu_mul-{n}x{m}", k.finish(), [a, torch.zeros(n, m, dtype=dtype)], s.values, {1: want})


def gelu(n: int = 7, m: int = 50, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> Case:
    """gelu(x + bias), with erf; the bias is broadcast."""
    k, s, e = KernelBuilder("gelu"), Sizes(dynamic), ELEMENTS[dtype]
    N, M = s(k, "n", n), s(k, "m", m)
    i, j = k.axis("i", N), k.axis("j", M)
    bx, bb, bz = k.buffer(e), k.buffer(e), k.buffer(e)
    x = k.apply("add", up(k, k.load(bx, i * M + j)), up(k, k.load(bb, j)))
    k.store(k.cast(_gelu(k, x), e), bz, i * M + j)
    a, b = rand(n, m, dtype=dtype) * 3, rand(m, dtype=dtype)
    want = F.gelu(a.float() + b.float()).to(dtype)
    return Case(f"gelu-{n}x{m}", k.finish(), [a, b, torch.zeros_like(a)], s.values, {2: want})


def _gelu(k: KernelBuilder, x: SSAValue) -> SSAValue:
    erf = k.apply("erf", k.apply("mul", x, k.constant(1 / math.sqrt(2), f32)))
    half = k.apply("mul", x, k.constant(0.5, f32))
    return k.apply("mul", half, k.apply("add", erf, k.constant(1.0, f32)))


def transpose(b: int = 3, n: int = 40, m: int = 33, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> Case:
    k, s, e = KernelBuilder("transpose"), Sizes(dynamic), ELEMENTS[dtype]
    B, N, M = s(k, "b", b), s(k, "n", n), s(k, "m", m)
    h, i, j = k.axis("h", B), k.axis("i", M), k.axis("j", N)
    bx, by = k.buffer(e), k.buffer(e)
    k.store(k.load(bx, h * N * M + j * M + i), by, h * N * M + i * N + j)
    a = rand(b, n, m, dtype=dtype)
    want = a.transpose(1, 2).contiguous()
    return Case(f"transpose-{b}x{n}x{m}", k.finish(), [a, torch.zeros_like(want)], s.values, {1: want})


def rotary(b: int = 2, t: int = 5, h: int = 3, d: int = 8, dtype: torch.dtype = torch.bfloat16) -> Case:
    """x * cos + rotate_half(x) * sin for x of (b, t, h, d): the other half by // and %."""
    k, e = KernelBuilder("rotary"), ELEMENTS[dtype]
    q, p, r, c = k.axis("q", b), k.axis("p", t), k.axis("r", h), k.axis("c", d)
    bx, bc, bs, by = k.buffer(e), k.buffer(e), k.buffer(e), k.buffer(e)
    row = q * (t * h * d) + p * (h * d) + r * d
    x, other = up(k, k.load(bx, row + c)), up(k, k.load(bx, row + (c + d // 2) % d))
    first = k.apply("lt", k.iota(c), k.constant(d // 2, i64))
    turned = k.apply("select", first, k.apply("neg", other), other)
    cos, sin = up(k, k.load(bc, p * d + c)), up(k, k.load(bs, p * d + c))
    y = k.apply("add", k.apply("mul", x, cos), k.apply("mul", turned, sin))
    k.store(k.cast(y, e), by, row + c)
    a, cs, sn = rand(b, t, h, d, dtype=dtype), rand(t, d, dtype=dtype), rand(t, d, dtype=dtype, seed=1)
    af, half = a.float(), d // 2
    turn = torch.cat([-af[..., half:], af[..., :half]], -1)
    want = (af * cs.float()[:, None] + turn * sn.float()[:, None]).to(dtype)
    return Case("rotary", k.finish(), [a, cs, sn, torch.zeros_like(a)], [], {3: want})


def gather(n: int = 11, m: int = 20, v: int = 30, dtype: torch.dtype = torch.float32) -> Case:
    """Rows of a table, by index; a negative index reads nothing and gives zero."""
    k, e = KernelBuilder("gather"), ELEMENTS[dtype]
    i, j = k.axis("i", n), k.axis("j", m)
    bt, bi, by = k.buffer(e), k.buffer(i64), k.buffer(e)
    at = k.load(bi, i)
    inside = k.apply("ge", at, k.constant(0, i64))
    k.store(k.load(bt, gathered(0) * m + j, [at], mask=inside), by, i * m + j)
    table, index = rand(v, m, dtype=dtype), torch.arange(n) * 7 % v
    index[3] = -5
    want = table[index.clamp(min=0)] * (index >= 0)[:, None]
    return Case("gather", k.finish(), [table, index, torch.ones(n, m, dtype=dtype)], [], {2: want})


def scatter_add(n: int = 50, v: int = 6) -> Case:
    """Atomic additions at gathered places."""
    k = KernelBuilder("scatter_add")
    i = k.axis("i", n)
    bx, bi, by = k.buffer(f32), k.buffer(i64), k.buffer(f32)
    k.store(k.load(bx, i), by, gathered(0), [k.load(bi, i)], mode="add")
    a, index, out = rand(n), torch.arange(n) * 5 % v, rand(v, seed=3)
    return Case("scatter_add", k.finish(), [a, index, out], [], {2: out.index_add(0, index, a)})


def dropout(n: int = 100, p: float = 0.25) -> Case:
    """Random bits, a threshold, a scaled choice."""
    k = KernelBuilder("dropout")
    i = k.axis("i", n)
    bx, bseed, by, bits = k.buffer(f32), k.buffer(i64), k.buffer(f32), k.buffer(i64)
    drawn = k.random(k.load(bseed, 0), k.iota(i + (1 << 33)))
    keep = k.apply("ge", drawn, k.constant(int(p * 2**32), i64))
    x = k.apply("mul", k.load(bx, i), k.constant(1 / (1 - p), f32))
    k.store(k.apply("select", keep, x, k.constant(0.0, f32)), by, i)
    k.store(drawn, bits, i)
    a, seed = rand(n), torch.tensor([0x1234_5678_9ABC])
    want = torch.tensor([philox(int(seed[0]), j + (1 << 33)) for j in range(n)])
    y = torch.where(want >= int(p * 2**32), a / (1 - p), 0.0)
    return Case(
        "dropout", k.finish(), [a, seed, torch.zeros(n), torch.zeros(n, dtype=torch.int64)], [], {2: y, 3: want}
    )


def uniform(n: int = 100) -> Case:
    """Numbers in [0, 1) from random bits: exact, so the same everywhere."""
    k = KernelBuilder("uniform")
    i = k.axis("i", n)
    bseed, by = k.buffer(i64), k.buffer(f32)
    bits = k.apply("shr", k.random(k.load(bseed, 0), k.iota(i)), k.constant(8, i64))
    k.store(k.apply("mul", k.cast(bits, f32), k.constant(2.0**-24, f32)), by, i)
    seed = torch.tensor([0x1234_5678_9ABC])
    want = torch.tensor([(philox(int(seed[0]), j) >> 8) * 2.0**-24 for j in range(n)])
    return Case("uniform", k.finish(), [seed, torch.zeros(n)], [], {1: want})


def philox(seed: int, offset: int) -> int:
    """Word offset % 4 of Philox-4x32-7 for the counter offset // 4 and the key (low, high of seed)."""
    c, k, low = [offset >> 2 & 0xFFFFFFFF, offset >> 34 & 0xFFFFFFFF, 0, 0], [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & low, (a >> 32) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c[offset % 4]


# --- along rows ---


def softmax(n: int = 5, m: int = 37, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> Case:
    k, s, e = KernelBuilder("softmax"), Sizes(dynamic), ELEMENTS[dtype]
    N, M = s(k, "n", n), s(k, "m", m)
    i, r = k.axis("i", N), k.axis("r", M, reduce=True)
    bx, by = k.buffer(e), k.buffer(e)
    x = up(k, k.load(bx, i * M + r))
    z = k.apply("exp", k.apply("sub", x, k.reduce("max", x, "r")))
    k.store(k.cast(k.apply("div", z, k.reduce("sum", z, "r")), e), by, i * M + r)
    a = rand(n, m, dtype=dtype) * 3
    want = a.float().softmax(-1).to(dtype)
    return Case(f"softmax-{n}x{m}", k.finish(), [a, torch.zeros_like(a)], s.values, {1: want})


def layer_norm(n: int = 4, m: int = 45, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> Case:
    """Two passes over the row, mean and 1/std stored too."""
    k, s, e = KernelBuilder("layer_norm"), Sizes(dynamic), ELEMENTS[dtype]
    N, M = s(k, "n", n), s(k, "m", m)
    i, r = k.axis("i", N), k.axis("r", M, reduce=True)
    bx, bw, bb, by, bmean, brstd = k.buffer(e), k.buffer(e), k.buffer(e), k.buffer(e), k.buffer(f32), k.buffer(f32)
    x = up(k, k.load(bx, i * M + r))
    count = k.cast(k.iota(M), f32)
    mean = k.apply("div", k.reduce("sum", x, "r"), count)
    d = k.apply("sub", x, mean)
    var = k.apply("div", k.reduce("sum", k.apply("mul", d, d), "r"), count)
    rstd = k.apply("rsqrt", k.apply("add", var, k.constant(1e-5, f32)))
    y = k.apply("mul", k.apply("mul", d, rstd), up(k, k.load(bw, r)))
    k.store(k.cast(k.apply("add", y, up(k, k.load(bb, r))), e), by, i * M + r)
    k.store(mean, bmean, i)
    k.store(rstd, brstd, i)
    a, w, b = rand(n, m, dtype=dtype) + 2, rand(m, dtype=dtype), rand(m, dtype=dtype, seed=1)
    y_, mean_, rstd_ = torch.native_layer_norm(a.float(), [m], w.float(), b.float(), 1e-5)
    tensors = [a, w, b, torch.zeros_like(a), torch.zeros(n), torch.zeros(n)]
    expected = {3: y_.to(dtype), 4: mean_.flatten(), 5: rstd_.flatten()}
    return Case(f"layer_norm-{n}x{m}", k.finish(), tensors, s.values, expected)


def rms_norm(n: int = 6, m: int = 70, dtype: torch.dtype = torch.bfloat16, dynamic: bool = False) -> Case:
    """With a residual that is added first and stored."""
    k, s, e = KernelBuilder("rms_norm"), Sizes(dynamic), ELEMENTS[dtype]
    N, M = s(k, "n", n), s(k, "m", m)
    i, r = k.axis("i", N), k.axis("r", M, reduce=True)
    bx, bres, bw, by, bsum = (k.buffer(e) for _ in range(5))
    total = k.cast(k.apply("add", up(k, k.load(bx, i * M + r)), up(k, k.load(bres, i * M + r))), e)
    k.store(total, bsum, i * M + r)
    x = up(k, total)
    mean = k.apply("div", k.reduce("sum", k.apply("mul", x, x), "r"), k.cast(k.iota(M), f32))
    scale = k.apply("rsqrt", k.apply("add", mean, k.constant(1e-6, f32)))
    y = k.apply("mul", k.apply("mul", x, scale), up(k, k.load(bw, r)))
    k.store(k.cast(y, e), by, i * M + r)
    a, res, w = rand(n, m, dtype=dtype), rand(n, m, dtype=dtype, seed=1), rand(m, dtype=dtype)
    sum_ = (a.float() + res.float()).to(dtype)
    want = F.rms_norm(sum_.float(), [m], w.float(), 1e-6).to(dtype)
    tensors = [a, res, w, torch.zeros_like(a), torch.zeros_like(a)]
    return Case(f"rms_norm-{n}x{m}", k.finish(), tensors, s.values, {3: want, 4: sum_})


def in_eight_bits(n: int = 6, m: int = 70, dtype: torch.dtype = torch.bfloat16, dynamic: bool = False) -> Case:
    """Rows over their largest magnitude, as numbers of 8 bits, and read back; the scales beside them."""
    k, s, e = KernelBuilder("in_eight_bits"), Sizes(dynamic), ELEMENTS[dtype]
    N, M = s(k, "n", n), s(k, "m", m)
    i, r = k.axis("i", N), k.axis("r", M, reduce=True)
    bx, bq, bs, by = k.buffer(e), k.buffer(f8), k.buffer(f32), k.buffer(f32)
    x = up(k, k.load(bx, i * M + r))
    scale = k.apply("div", k.reduce("max", k.apply("abs", x), "r"), k.constant(448.0, f32))
    q = k.cast(k.apply("div", x, scale), f8)
    k.store(q, bq, i * M + r)
    k.store(scale, bs, i)
    k.store(k.cast(q, f32), by, i * M + r)
    a = (rand(n, m) * 10.0 ** rand(n, m, seed=1)).to(dtype)
    a[1:2, :3] = torch.tensor([0.0, -0.0, math.nan])[: min(3, m)]
    scales = a.float().abs().amax(1, keepdim=True) / 448
    want = (a.float() / scales).to(torch.float8_e4m3fn)
    tensors = [a, torch.zeros_like(want), torch.zeros(n), torch.zeros(n, m)]
    return Case(f"in_eight_bits-{n}x{m}", k.finish(), tensors, s.values, {1: want, 2: scales[:, 0], 3: want.float()})


def in_five_and_two(n: int = 6, m: int = 70, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> Case:
    """Numbers as those of 8 bits with five for the exponent, by rows and by columns, and read back."""
    k, s, e = KernelBuilder("in_five_and_two"), Sizes(dynamic), ELEMENTS[dtype]
    N, M = s(k, "n", n), s(k, "m", m)
    i, j = k.axis("i", N), k.axis("j", M)
    bx, bq, bt, by = k.buffer(e), k.buffer(f8e5), k.buffer(f8e5), k.buffer(f32)
    q = k.cast(up(k, k.load(bx, i * M + j)), f8e5)
    k.store(q, bq, i * M + j)
    k.store(q, bt, j * N + i)
    k.store(k.cast(q, f32), by, i * M + j)
    a = rand(n, m) * 10.0 ** (5 * rand(n, m, seed=1))
    edges = [61439.0, -61440.0, 57344.0, 2.0**-16, 2.0**-17, 1.5 * 2.0**-16, -0.0, INF, -INF, NAN, 3e38]
    a.view(-1)[: len(edges)] = torch.tensor(edges)[: n * m]
    a = a.to(dtype)
    want = a.float().to(torch.float8_e5m2)
    turned = want.view(torch.uint8).t().contiguous().view(torch.float8_e5m2)
    tensors = [a, torch.zeros_like(want), torch.zeros_like(turned), torch.zeros(n, m)]
    return Case(f"in_five_and_two-{n}x{m}", k.finish(), tensors, s.values, {1: want, 2: turned, 3: want.float()})


def cross_entropy(n: int = 5, m: int = 41, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> Case:
    """logsumexp(row) minus the row at its target; the target is gathered; targets of -100 give zero."""
    k, s, e = KernelBuilder("cross_entropy"), Sizes(dynamic), ELEMENTS[dtype]
    N, M = s(k, "n", n), s(k, "m", m)
    i, r = k.axis("i", N), k.axis("r", M, reduce=True)
    bx, bt, by = k.buffer(e), k.buffer(i64), k.buffer(f32)
    x = up(k, k.load(bx, i * M + r))
    top = k.reduce("max", x, "r")
    total = k.reduce("sum", k.apply("exp", k.apply("sub", x, top)), "r")
    target = k.load(bt, i)
    valid = k.apply("ne", target, k.constant(-100, i64))
    picked = up(k, k.load(bx, i * M + gathered(0), [target], mask=valid))
    loss = k.apply("sub", k.apply("add", k.apply("log", total), top), picked)
    k.store(k.apply("select", valid, loss, k.constant(0.0, f32)), by, i)
    a, t = rand(n, m, dtype=dtype) * 2, torch.arange(n) * 13 % m
    t[1] = -100
    want = F.cross_entropy(a.float(), t, reduction="none")
    return Case(f"cross_entropy-{n}x{m}", k.finish(), [a, t, torch.ones(n)], s.values, {2: want})


INF, NAN = math.inf, math.nan
EDGES = ([-INF] * 9, [1.0, INF, -INF], [NAN, 2.0], [INF, NAN], [-INF, 3.0, -1e30], [88.0] * 9, [-3e38, 3e38])


def softmax_sums(
    n: int = 9, m: int = 43, dtype: torch.dtype = torch.float32, fn: str = "exp", infinite: str = "itself",
    dynamic: bool = False,
) -> Case:  # fmt: skip
    """The largest element and the total in one operation, with rows of infinities and NaN."""
    k, sizes = KernelBuilder("softmax_sums"), Sizes(dynamic)
    rows, columns = sizes(k, "n", n), sizes(k, "m", m)
    i, r = k.axis("i", rows), k.axis("r", columns, reduce=True)
    x, top, total = k.buffer(ELEMENTS[dtype]), k.buffer(f32), k.buffer(f32)
    found = k.reduce_exp(up(k, k.load(x, i * columns + r)), "r", fn, infinite)
    for value, buffer in zip(found, (top, total), strict=True):
        k.store(value, buffer, i)
    a = rand(n, m) * 3
    a[0] *= 50
    for row, edge in zip(range(1, n), EDGES, strict=False):
        a[row, : len(edge)] = torch.tensor(edge)[:m]
    a[1] = -INF if n > 1 else a[0]
    a = a.to(dtype)
    high = a.float().amax(1)
    base = torch.where(high.isinf(), 0, high) if infinite == "zero" else high
    sums = getattr(torch, fn)((a.float() - base[:, None]).double()).sum(1).float()
    name = f"softmax_sums-{n}x{m}-{fn}-{infinite}"
    return Case(name, k.finish(), [a, torch.zeros(n), torch.zeros(n)], sizes.values, {1: high, 2: sums})


def argmax(n: int = 4, m: int = 29, dynamic: bool = False) -> Case:
    """The first of equals; a NaN is largest; max and min with NaN beside it."""
    k, s = KernelBuilder("argmax"), Sizes(dynamic)
    N, M = s(k, "n", n), s(k, "m", m)
    i, r = k.axis("i", N), k.axis("r", M, reduce=True)
    bx, ba, bb, bc, bd = k.buffer(f32), k.buffer(i64), k.buffer(i64), k.buffer(f32), k.buffer(f32)
    x = k.load(bx, i * M + r)
    for kind, out in (("argmax", ba), ("argmin", bb), ("max", bc), ("min", bd)):
        k.store(k.reduce(kind, x, "r"), out, i)
    a = rand(n, m).round()
    if m > 9:
        a[1, 4] = a[1, 9] = float("nan")
    whole = torch.zeros(n, dtype=torch.int64)
    expected = {1: a.argmax(1), 2: a.argmin(1), 3: a.amax(1), 4: a.amin(1)}
    tensors = [a, whole, whole.clone(), torch.zeros(n), torch.zeros(n)]
    return Case(f"argmax-{n}x{m}", k.finish(), tensors, s.values, expected)


def flags(n: int = 6, m: int = 19) -> Case:
    """any and all of x > 0, product, and an integer sum; truth values are bytes in memory."""
    k = KernelBuilder("flags")
    i, r = k.axis("i", n), k.axis("r", m, reduce=True)
    bx, bq, ba, bb, bp, bs = k.buffer(f32), k.buffer(i1), k.buffer(i1), k.buffer(i1), k.buffer(f32), k.buffer(i64)
    x, q = k.load(bx, i * m + r), k.load(bq, i * m + r)
    positive = k.apply("gt", x, k.constant(0.0, f32))
    k.store(k.reduce("any", k.apply("logical_and", positive, q), "r"), ba, i)
    k.store(k.reduce("all", positive, "r"), bb, i)
    k.store(k.reduce("prod", x, "r"), bp, i)
    k.store(k.reduce("sum", k.cast(q, i64), "r"), bs, i)
    a = rand(n, m)
    a[0], a[1] = a[0].abs() + 0.1, -a[1].abs() - 0.1
    b = rand(n, m, seed=2) > 0
    yes = torch.zeros(n, dtype=torch.bool)
    expected = {2: ((a > 0) & b).any(1), 3: (a > 0).all(1), 4: a.prod(1), 5: b.sum(1)}
    return Case(
        "flags", k.finish(), [a, b, yes, yes.clone(), torch.zeros(n), torch.zeros(n, dtype=torch.int64)], [], expected
    )


def cumsum(n: int = 3, m: int = 50, kind: str = "sum", dynamic: bool = False) -> Case:
    """A running combination along the row, in two passes: the total is subtracted from it afterwards."""
    k, s = KernelBuilder(f"cum{kind}"), Sizes(dynamic)
    N, M = s(k, "n", n), s(k, "m", m)
    i, r = k.axis("i", N), k.axis("r", M, reduce=True)
    bx, by = k.buffer(f32), k.buffer(f32)
    x = k.load(bx, i * M + r)
    k.store(k.apply("sub", k.scan(kind, x, "r"), k.reduce("max", x, "r")), by, i * M + r)
    a = rand(n, m) * (0.1 if kind == "prod" else 1.0) + (1.0 if kind == "prod" else 0.0)
    ran = {"sum": a.cumsum(1), "prod": a.cumprod(1), "max": a.cummax(1)[0], "min": a.cummin(1)[0]}[kind]
    want = ran - a.amax(1, keepdim=True)
    return Case(f"cum{kind}-{n}x{m}", k.finish(), [a, torch.zeros_like(a)], s.values, {1: want})


def running_places(n: int = 300, m: int = 6, dynamic: bool = False) -> Case:
    """How many of the rows up to each one are of its class, for every class: running sums down columns, in 64 bits."""
    k, s = KernelBuilder("running_places"), Sizes(dynamic)
    N, M = s(k, "n", n), s(k, "m", m)
    j, r = k.axis("j", M), k.axis("r", N, reduce=True)
    bx, by = k.buffer(i64), k.buffer(i64)
    chosen = k.cast(k.apply("eq", k.load(bx, r), k.iota(j)), i64)
    k.store(k.apply("mul", k.scan("sum", chosen, "r"), chosen), by, r * M + j)
    classes = torch.randint(0, m, (n,), generator=torch.Generator().manual_seed(5))
    hot = torch.nn.functional.one_hot(classes, m)
    return Case(
        f"running_places-{n}x{m}", k.finish(), [classes, torch.zeros_like(hot)], s.values, {1: hot.cumsum(0) * hot}
    )


def shared_row(n: int = 5, m: int = 19, dynamic: bool = False) -> Case:
    """A reduction of a row that all rows share: its result varies over no axis."""
    k, s = KernelBuilder("shared_row"), Sizes(dynamic)
    N, M = s(k, "n", n), s(k, "m", m)
    i, r = k.axis("i", N), k.axis("r", M, reduce=True)
    bx, bw, by, bz, bt = k.buffer(f32), k.buffer(f32), k.buffer(f32), k.buffer(i64), k.buffer(f32)
    w = k.load(bw, r)
    total = k.reduce("sum", w, "r")
    k.store(k.apply("add", k.load(bx, i), total), by, i)
    k.store(k.reduce("argmax", w, "r"), bz, 0)
    k.store(total, bt, 0)
    a, b = rand(n), rand(m)
    tensors = [a, b, torch.zeros(n), torch.zeros(1, dtype=torch.int64), torch.zeros(1)]
    return Case(
        f"shared_row-{n}x{m}", k.finish(), tensors, s.values, {2: a + b.sum(), 3: b.argmax()[None], 4: b.sum()[None]}
    )


# --- along columns, and over everything ---


def column_sum(n: int = 100, m: int = 37, dtype: torch.dtype = torch.bfloat16, dynamic: bool = False) -> Case:
    """Sum over the slow axis (the gradient of a bias), scaled."""
    k, s, e = KernelBuilder("column_sum"), Sizes(dynamic), ELEMENTS[dtype]
    N, M = s(k, "n", n), s(k, "m", m)
    r, j = k.axis("r", N, reduce=True), k.axis("j", M)
    bx, by = k.buffer(e), k.buffer(e)
    total = k.reduce("sum", up(k, k.load(bx, r * M + j)), "r")
    k.store(k.cast(k.apply("mul", total, k.constant(0.5, f32)), e), by, j)
    a = rand(n, m, dtype=dtype)
    want = (a.float().sum(0) * 0.5).to(dtype)
    return Case(f"column_sum-{n}x{m}", k.finish(), [a, torch.zeros(m, dtype=dtype)], s.values, {1: want})


def middle_max(b: int = 3, n: int = 21, m: int = 10, dynamic: bool = False) -> Case:
    """Maximum over the middle axis of three."""
    k, s = KernelBuilder("middle_max"), Sizes(dynamic)
    B, N, M = s(k, "b", b), s(k, "n", n), s(k, "m", m)
    h, r, j = k.axis("h", B), k.axis("r", N, reduce=True), k.axis("j", M)
    bx, by = k.buffer(f32), k.buffer(f32)
    k.store(k.reduce("max", k.load(bx, h * N * M + r * M + j), "r"), by, h * M + j)
    a = rand(b, n, m)
    return Case(f"middle_max-{b}x{n}x{m}", k.finish(), [a, torch.zeros(b, m)], s.values, {1: a.amax(1)})


def full_sum(n: int = 1000, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> Case:
    """Mean of squares, and the largest, of everything."""
    k, s, e = KernelBuilder("full_sum"), Sizes(dynamic), ELEMENTS[dtype]
    N = s(k, "n", n)
    r = k.axis("r", N, reduce=True)
    bx, by, bz = k.buffer(e), k.buffer(f32), k.buffer(f32)
    x = up(k, k.load(bx, r))
    k.store(k.apply("div", k.reduce("sum", k.apply("mul", x, x), "r"), k.cast(k.iota(N), f32)), by, 0)
    k.store(k.reduce("max", x, "r"), bz, 0)
    a = rand(n, dtype=dtype)
    expected = {1: a.float().square().mean()[None], 2: a.float().amax()[None]}
    return Case(f"full_sum-{n}", k.finish(), [a, torch.zeros(1), torch.zeros(1)], s.values, expected)


# --- rows, and sums over the rows in the same kernel ---


def norm_backward(n: int = 21, m: int = 45, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> Case:
    """The gradients of a layer norm: of its argument row by row, of its weight and bias summed over the rows."""
    k, s, e = KernelBuilder("norm_backward"), Sizes(dynamic), ELEMENTS[dtype]
    N = s(k, "n", n)
    i, r = k.axis("i", N), k.axis("r", m, reduce=True)
    bg, bx, bw, bmean, bscale = k.buffer(e), k.buffer(e), k.buffer(e), k.buffer(f32), k.buffer(f32)
    bdx, bdw, bdb = k.buffer(e), k.buffer(e), k.buffer(f32)
    g, x, w = up(k, k.load(bg, i * m + r)), up(k, k.load(bx, i * m + r)), up(k, k.load(bw, r))
    scale, many = k.load(bscale, i), k.constant(m, f32)
    unit = k.apply("mul", k.apply("sub", x, k.load(bmean, i)), scale)
    inner = k.apply("mul", g, w)
    one = k.apply("div", k.reduce("sum", k.apply("mul", inner, unit), "r"), many)
    two = k.apply("div", k.reduce("sum", inner, "r"), many)
    left = k.apply("sub", k.apply("sub", inner, two), k.apply("mul", unit, one))
    k.store(k.cast(k.apply("mul", left, scale), e), bdx, i * m + r)
    k.store(k.cast(k.reduce("sum", k.apply("mul", g, unit), "i"), e), bdw, r)
    k.store(k.apply("mul", k.reduce("sum", g, "i"), k.constant(2.0, f32)), bdb, r)
    a, c, v = rand(n, m, dtype=dtype), rand(n, m, dtype=dtype, seed=1), rand(m, dtype=dtype)
    wide = a.double()
    mean, rstd = wide.mean(-1, keepdim=True).float(), (wide.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt().float()
    want = torch.ops.aten.native_layer_norm_backward(
        c.double(), wide, [m], mean.double(), rstd.double(), v.double(), v.double(), [True, True, True]
    )
    tensors = [c, a, v, mean, rstd, torch.zeros_like(a), torch.zeros(m, dtype=dtype), torch.zeros(m)]
    expected = {5: want[0].to(dtype), 6: want[1].to(dtype), 7: 2 * want[2].float()}
    return Case(f"norm_backward-{n}x{m}", k.finish(), tensors, s.values, expected)


# --- products ---


def matmul(
    m: int = 35, n: int = 50, p: int = 40, dtype: torch.dtype = torch.bfloat16, dynamic: bool = False, batch: int = 1
) -> Case:
    """gelu(x @ w.T + bias), for every batch."""
    k, s, e = KernelBuilder("matmul"), Sizes(dynamic), ELEMENTS[dtype]
    M, N, P = s(k, "m", m), s(k, "n", n), s(k, "p", p)
    g, i, j, r = k.axis("g", batch), k.axis("i", M), k.axis("j", N), k.axis("r", P, reduce=True)
    bx, bw, bb, by = (k.buffer(e) for _ in range(4))
    product = k.contract(k.load(bx, g * M * P + i * P + r), k.load(bw, g * N * P + j * P + r), "r")
    y = _gelu(k, k.apply("add", product, up(k, k.load(bb, j))))
    k.store(k.cast(y, e), by, g * M * N + i * N + j)
    a, w, b = rand(batch, m, p, dtype=dtype), rand(batch, n, p, dtype=dtype, seed=1), rand(n, dtype=dtype)
    want = F.gelu(a.float() @ w.float().transpose(1, 2) + b.float()).to(dtype)
    return Case(f"matmul-{batch}x{m}x{n}x{p}", k.finish(), [a, w, b, torch.zeros_like(want)], s.values, {3: want})


def matvec(n: int = 30, p: int = 45, dtype: torch.dtype = torch.bfloat16) -> Case:
    """A contraction with only one free axis."""
    k, e = KernelBuilder("matvec"), ELEMENTS[dtype]
    j, r = k.axis("j", n), k.axis("r", p, reduce=True)
    bx, bw, by = k.buffer(e), k.buffer(e), k.buffer(f32)
    k.store(k.contract(k.load(bx, r), k.load(bw, j * p + r), "r"), by, j)
    a, w = rand(p, dtype=dtype), rand(n, p, dtype=dtype)
    return Case("matvec", k.finish(), [a, w, torch.zeros(n)], [], {2: w.float() @ a.float()})


MAKERS: list[Callable[[], Case]] = [
    pointwise, silu_mul, gelu, transpose, rotary, gather, scatter_add, dropout, uniform, softmax, layer_norm, rms_norm,
    in_eight_bits, in_five_and_two, cross_entropy, softmax_sums, argmax, flags, shared_row, cumsum, column_sum,
    middle_max, full_sum, matmul, matvec, running_places,
]  # fmt: skip
DYNAMIC = [
    pointwise, silu_mul, gelu, transpose, softmax, layer_norm, rms_norm, cross_entropy, softmax_sums, argmax, cumsum,
    column_sum, middle_max, full_sum, matmul, running_places,
]  # fmt: skip


def sequential_cases() -> list[Case]:
    """Not every target has them."""
    return [
        norm_backward(), norm_backward(dynamic=True), norm_backward(32, 64, torch.bfloat16), norm_backward(5, 1031),
        norm_backward(70, 40, torch.bfloat16, dynamic=True),
    ]  # fmt: skip


def cases() -> list[Case]:
    """Every kernel once with literal sizes, and once with symbols where it has them; all sizes are odd ones."""
    return [make() for make in MAKERS] + [make(dynamic=True) for make in DYNAMIC]  # type: ignore[call-arg]
