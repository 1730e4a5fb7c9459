"""The CPU target against the reference interpreter: random kernels, every function, every element type."""

from __future__ import annotations

import math
import os
import random

import kernels
import pytest
import torch
from xdsl.ir import SSAValue

from tessera.tile.dialect import interp
from tessera.tile.dialect.build import KernelBuilder, bf16, f16, f32, f64, i1, i8, i16, i32, i64
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.index import gathered
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.cpu import jit
from tessera.tile.targets.cpu.target import CpuTarget
from tessera.util import disk as cache
from tessera.util.errors import OptionError


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory):
    before = os.environ.get("TESSERA_CACHE")
    os.environ["TESSERA_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["TESSERA_CACHE"]
    else:
        os.environ["TESSERA_CACHE"] = before


PLAIN = Schedule()
TARGET = CpuTarget()


def check(kernel: KernelOp, tensors, symbols=(), schedule=PLAIN, rtol=2e-6, atol=1e-6) -> None:
    """Run on the CPU and in the interpreter; all buffers must agree."""
    mine, theirs = [t.clone() for t in tensors], [t.clone() for t in tensors]
    TARGET.compile(kernel, schedule)(mine, list(symbols))
    interp.run(kernel, theirs, list(symbols))
    for a, b in zip(mine, theirs, strict=True):
        if a.dtype in (torch.bfloat16, torch.float16):
            torch.testing.assert_close(a, b, equal_nan=True)
        else:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


def data(element, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(element)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-50 if dtype != torch.uint8 else 0, 50, shape, generator=generator).to(dtype)


# --- pointwise ---

SIZES = [0, 1, 7, 16, 33, 64, 100, 1000, 4096, 9001]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_pointwise_sizes(n, dynamic):
    k = KernelBuilder("chain")
    i = k.axis("i", "n" if dynamic else n)
    x, y, o = k.buffer(f32), k.buffer(f32), k.buffer(f32)
    a, b = k.load(x, i), k.load(y, i)
    k.store(k.apply("mul", k.apply("add", a, b), k.apply("maximum", a, k.constant(0.25, f32))), o, i)
    # one element beyond the end shows a store that went too far
    check(k.finish(), [data(f32, n + 1), data(f32, n + 1, seed=1), torch.full((n + 1,), 9.0)], [n] if dynamic else [])


POINTS = {
    "float": torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e-3, 1e10, -1e10, 2.0, math.inf, -math.inf, math.nan]
    ),
    "int": torch.tensor([0, 1, -1, 2, -2, 3, 7, -7, 31, 100, -100, 127, -128]),
}
BITS = ["bit_and", "bit_or", "bit_xor", "bit_not", "shl", "shr"]
FLOAT_FUNCTIONS = [f for f in FUNCTIONS if f not in BITS]
INTEGER_FUNCTIONS = [
    *("add", "sub", "mul", "floordiv", "truncdiv", "mod", "fmod", "neg", "abs", "sign", "maximum", "minimum", "fma"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "select"),
    *BITS,
]


def every_pair(points: torch.Tensor, arity: int, dtype: torch.dtype) -> list[torch.Tensor]:
    grids = torch.meshgrid(*[points] * arity, indexing="ij")
    return [g.reshape(-1).to(dtype).contiguous() for g in grids]


def applied(k: KernelBuilder, fn: str, element, args: list[SSAValue]) -> SSAValue:
    """The function of these arguments; a select's first is a condition."""
    if fn == "select":
        args = [k.apply("ne", args[0], k.constant(0, element)), *args[1:]]
    return k.apply(fn, *args)


def one_function(fn: str, element, args: list[torch.Tensor]) -> tuple[KernelOp, list[torch.Tensor]]:
    k = KernelBuilder("one")
    n = args[0].numel()
    i = k.axis("i", n)
    buffers = [k.buffer(element) for _ in args]
    result = applied(k, fn, element, [k.load(b, i) for b in buffers])
    out = k.buffer(result.type.element)
    k.store(result, out, i)
    return k.finish(), [*args, torch.zeros(n, dtype=torch_dtype(result.type.element))]


@pytest.mark.parametrize("fn", FLOAT_FUNCTIONS)
@pytest.mark.parametrize("element", [f32, f64], ids=str)
def test_float_function(fn, element):
    points = POINTS["float"] if FUNCTIONS[fn].arity < 3 else POINTS["float"][::2]
    args = every_pair(points, FUNCTIONS[fn].arity, torch_dtype(element))
    kernel, tensors = one_function(fn, element, args)
    check(kernel, tensors, rtol=1e-6 if element == f32 else 1e-14, atol=1e-7 if element == f32 else 1e-15)


@pytest.mark.parametrize("arity", [1, 2, 3])
@pytest.mark.parametrize("element", [i8, i16, i32, i64], ids=str)
def test_integer_functions(arity, element):
    """All functions of one arity in one kernel."""
    args = every_pair(POINTS["int"], arity, torch_dtype(element))
    if arity == 2:  # PyTorch refuses to divide by zero
        args = [a[args[1] != 0] for a in args]
    k = KernelBuilder("integers")
    n = args[0].numel()
    i = k.axis("i", n)
    values = [k.load(k.buffer(element), i) for _ in args]
    for fn in INTEGER_FUNCTIONS:
        if FUNCTIONS[fn].arity == arity:
            result = applied(k, fn, element, values)
            out = k.buffer(result.type.element)
            k.store(result, out, i)
            args.append(torch.zeros(n, dtype=torch_dtype(result.type.element)))
    check(k.finish(), args)


def test_integer_division_edges_do_not_trap():
    low = torch.iinfo(torch.int32).min
    kernel, tensors = one_function(
        "truncdiv", i32, [torch.tensor([low, 5], dtype=torch.int32), torch.tensor([-1, 0], dtype=torch.int32)]
    )
    TARGET.compile(kernel, Schedule())(tensors)
    assert tensors[-1][0] == low


def test_integer_power():
    base, power = every_pair(torch.tensor([0, 1, -1, 2, -3, 7]), 2, torch.int64)
    keep = (power >= 0) | (base.abs() == 1)
    kernel, tensors = one_function("pow", i64, [base[keep], power[keep]])
    TARGET.compile(kernel, Schedule())(tensors)
    want = [int(b) ** abs(int(p)) for b, p in zip(base[keep], power[keep], strict=True)]
    assert tensors[-1].tolist() == want


ELEMENTS = [f16, bf16, f32, f64, i1, i8, i16, i32, i64]


@pytest.mark.parametrize("source", ELEMENTS, ids=str)
def test_casts(source):
    n = 77
    k = KernelBuilder("casts")
    i = k.axis("i", n)
    x = k.buffer(source)
    outs = [k.buffer(e) for e in ELEMENTS]
    a = k.load(x, i)
    for e, o in zip(ELEMENTS, outs, strict=True):
        k.store(k.cast(a, e), o, i)
    check(k.finish(), [data(source, n), *(torch.zeros(n, dtype=torch_dtype(e)) for e in ELEMENTS)])


@pytest.mark.parametrize("element", [f16, bf16], ids=str)
def test_short_floats_round_to_even(element):
    bits = torch.arange(0, 2**32, 65521 * 4, dtype=torch.int64)
    x = torch.cat([bits.to(torch.int32).view(torch.float32), POINTS["float"], torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])])
    k = KernelBuilder("round")
    i = k.axis("i", x.numel())
    a, o, back = k.buffer(f32), k.buffer(element), k.buffer(f32)
    short = k.cast(k.load(a, i), element)
    k.store(short, o, i)
    k.store(k.cast(short, f32), back, i)
    tensors = [x, torch.zeros(x.numel(), dtype=torch_dtype(element)), torch.zeros(x.numel())]
    TARGET.compile(k.finish(), Schedule())(tensors)
    want = x.to(torch_dtype(element))
    nan = want.isnan()
    assert torch.equal(tensors[1].isnan(), nan) and torch.equal(tensors[1][~nan], want[~nan])
    assert torch.equal(tensors[2][~nan], want.float()[~nan])


# --- how memory is walked ---


def test_layouts():
    """Rows, columns, a transposed store, a broadcast, a step of two, a division, a modulo."""
    n, m = 37, 50
    k = KernelBuilder("layouts")
    i, j = k.axis("i", n), k.axis("j", m)
    x, row, column, half, o, t = (k.buffer(f32) for _ in range(6))
    a = k.load(x, i * m + j)
    b = k.apply("add", k.load(row, j), k.load(column, i))
    c = k.apply("add", k.load(half, j // 2), k.load(half, j % 7))
    v = k.apply("add", k.apply("mul", a, b), c)
    v = k.apply("add", v, k.load(x, (i * 2) * m // 4 + j * 2 % 50))
    k.store(v, o, i * m + j)
    k.store(v, t, j * n + i)
    tensors = [data(f32, n, m), data(f32, m, seed=1), data(f32, n, seed=2), data(f32, m, seed=3)]
    kernel = k.finish()
    for axis in "ij":
        out = [torch.zeros(n * m), torch.zeros(n * m)]
        check(kernel, [*tensors, *out], schedule=Schedule(extra=(("vector", axis),)))


@pytest.mark.parametrize("n", [64, 65, 128, 200])
def test_quotients_of_a_flat_axis(n):
    """A flat axis over rows of 64: whole registers lie in one row."""
    k = KernelBuilder("flat")
    c = k.axis("c", n)
    x, row, o = k.buffer(f32), k.buffer(f32), k.buffer(f32)
    v = k.apply("add", k.load(x, c % 64), k.load(row, c // 64))
    k.store(k.apply("mul", v, k.load(x, c // 64 * 3 + c % 48)), o, c)
    check(k.finish(), [data(f32, 128), data(f32, 8, seed=1), torch.zeros(n)])


@pytest.mark.parametrize("element", [f32, bf16, i1, f64], ids=str)
def test_transposed_operand(element):
    """Squares that are whole, cut at the right, cut below; sizes as numbers and as symbols."""
    for n, m in [(64, 48), (50, 48), (64, 37), (19, 23), ("n", "m")]:
        k = KernelBuilder("turn")
        i, j = k.axis("i", n), k.axis("j", m)
        size_n, size_m = (k.symbol(s) if isinstance(s, str) else s for s in (n, m))
        x, y, o = k.buffer(element), k.buffer(element), k.buffer(element)
        a = k.apply("maximum", k.load(x, j * size_n + i), k.load(y, i * size_m + j))
        k.store(a, o, i * size_m + j)
        kernel = k.finish()
        for rows, columns in [(n, m)] if n != "n" else [(33, 40), (5, 3), (0, 4), (16, 16)]:
            tensors = [data(element, rows * columns, seed=s) for s in range(3)]
            check(kernel, tensors, [rows, columns] if n == "n" else [])


def test_axis_names_that_end_in_numbers():
    k = KernelBuilder("names")
    axes = [k.axis(f"d{n}", 3) for n in (1, 12, 2, 21, 3)]
    x, o = k.buffer(f32), k.buffer(f32)
    where = sum((a * 3**n for n, a in enumerate(axes)), start=0 * axes[0])
    back = sum((a * 3 ** (4 - n) for n, a in enumerate(axes)), start=0 * axes[0])
    k.store(k.load(x, where), o, back)
    check(k.finish(), [data(f32, 243), torch.zeros(243)])


def test_joined_axes_with_symbols():
    k = KernelBuilder("rows", symbols=["n", "m"])
    i, j = k.axis("i", "n"), k.axis("j", "m")
    x, o = k.buffer(f32), k.buffer(f32)
    k.store(k.apply("neg", k.load(x, i * k.symbol("m") + j)), o, i * k.symbol("m") + j)
    kernel = k.finish()
    for n, m in [(3, 5), (1, 100), (64, 64), (0, 3)]:
        check(kernel, [data(f32, n * m), torch.zeros(n * m)], [n, m])


def test_masks_and_gathers():
    n = 123
    k = KernelBuilder("masks")
    i = k.axis("i", n)
    x, index, o = k.buffer(f32), k.buffer(i64), k.buffer(f32)
    where = k.load(index, i)
    inside = k.apply("lt", k.iota(i), k.constant(100, i64))
    a = k.load(x, gathered(0) * 2, [where], mask=inside, other=k.constant(-1.0, f32))
    b = k.load(x, i + 1000000, mask=k.apply("lt", k.iota(i), k.constant(-5, i64)))
    k.store(k.apply("add", a, b), o, i, mask=k.apply("gt", k.load(x, i), k.constant(0.0, f32)))
    picks = torch.randint(0, n // 2, (n,), generator=torch.Generator().manual_seed(1))
    check(k.finish(), [data(f32, n), picks, torch.full((n,), 5.0)])


def test_masked_scalar_load():
    k = KernelBuilder("scalar")
    i, j = k.axis("i", 5), k.axis("j", 40)
    x, o = k.buffer(f32), k.buffer(f32)
    a = k.load(x, i + 10**12, mask=k.apply("lt", k.iota(i), k.constant(0, i64)), other=k.constant(3.0, f32))
    k.store(k.apply("add", a, k.load(x, j)), o, i * 64 + j)
    check(k.finish(), [data(f32, 40), torch.zeros(5 * 64)])


@pytest.mark.parametrize("element", [f32, f64, bf16, f16, i32, i64], ids=str)
def test_atomic_add(element):
    n = 200
    k = KernelBuilder("add")
    i = k.axis("i", n)
    x, index, o = k.buffer(element), k.buffer(i64), k.buffer(element)
    k.store(k.load(x, i), o, gathered(0), [k.load(index, i)], mode="add")
    picks = torch.randint(0, 5, (n,), generator=torch.Generator().manual_seed(1))
    x = torch.randint(-3, 4, (n,), generator=torch.Generator().manual_seed(2)).to(torch_dtype(element))
    check(k.finish(), [x, picks, torch.zeros(5, dtype=torch_dtype(element))])


def test_add_happens_once_along_other_axes():
    k = KernelBuilder("once")
    i, j = k.axis("i", 6), k.axis("j", 9000)
    x, o, p = k.buffer(f32), k.buffer(f32), k.buffer(f32)
    k.store(k.load(x, i), o, i * 0, mode="add")
    k.store(k.apply("mul", k.load(x, i), k.load(x, j)), p, i * 9000 + j)
    check(k.finish(), [data(f32, 9000), torch.zeros(1), torch.zeros(6 * 9000)])


def test_random_bits():
    n = 1000
    k = KernelBuilder("bits")
    i = k.axis("i", n)
    seed, o = k.buffer(i64), k.buffer(i64)
    k.store(k.random(k.load(seed, 0), k.iota(i * (2**30 + 7))), o, i)
    check(k.finish(), [torch.tensor([-(2**60) + 12345]), torch.zeros(n, dtype=torch.int64)])


# --- reductions ---

REDUCE = {
    "sum": [f32, f64, i64],
    "prod": [f32, i64],
    "max": [f32, f64, i32, i64],
    "min": [f32, i8],
    "any": [i1],
    "all": [i1],
    "argmax": [f32, i32],
    "argmin": [f64],
}


SHAPES = [(5, 1), (3, 16), (9, 37), (2, 64), (70, 65), (4, 1000), (1, 0)]


@pytest.mark.parametrize("kind", REDUCE)
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_reduce(kind, rows):
    """Sizes as symbols (one kernel for all of them), then as numbers."""
    for element in REDUCE[kind]:
        dynamic = reduction(kind, element, rows, "n", "m")
        for n, m in SHAPES:
            values = data(element, n * m)
            values = 1 + values / 100 if kind == "prod" and element == f32 else values
            out = torch.zeros(n, dtype=torch_dtype(dynamic.buffers[1].type.element))
            check(dynamic, [values, out], [n, m], rtol=1e-5)
            if (n, m) in SHAPES[2:5]:
                check(reduction(kind, element, rows, n, m), [values, out], rtol=1e-5)


def reduction(kind, element, rows, n, m) -> KernelOp:
    k = KernelBuilder("reduce", symbols=[s for s in (n, m) if isinstance(s, str)])
    i, r = k.axis("i", n), k.axis("r", m, reduce=True)
    size_n, size_m = (k.symbol(s) if isinstance(s, str) else s for s in (n, m))
    total = k.reduce(kind, k.load(k.buffer(element), i * size_m + r if rows else r * size_n + i), "r")
    k.store(total, k.buffer(total.type.element), i)
    return k.finish()


@pytest.mark.parametrize("kind", ["max", "min", "argmax", "argmin", "sum"])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_nan_wins(kind, rows):
    n, m = 20, 100
    kernel = reduction(kind, f32, rows, n, m)
    for at in (0, 3, 63, 64, 99):
        values = data(f32, n, m)
        values[3, at] = math.nan
        values[4, at] = math.inf
        values[5, at:] = -math.inf
        values[6, :] = -math.inf
        values[7, :] = 1.0
        values = values if rows else values.T.contiguous()
        check(kernel, [values, torch.zeros(n, dtype=torch_dtype(kernel.buffers[1].type.element))], rtol=1e-5)


def softmax(n, m, element=f32, rows=True, symbols=()):
    k = KernelBuilder("softmax", symbols=symbols)
    i, r = k.axis("i", n), k.axis("r", m, reduce=True)
    x, y = k.buffer(element), k.buffer(element)
    size_n, size_m = (k.symbol(s) if isinstance(s, str) else s for s in (n, m))
    at = i * size_m + r if rows else r * size_n + i
    a = k.load(x, at)
    a = k.cast(a, f32) if element in (f16, bf16) else a
    e = k.apply("exp", k.apply("sub", a, k.reduce("max", a, "r")))
    k.store(k.cast(k.apply("div", e, k.reduce("sum", e, "r")), element), y, at)
    return k.finish()


@pytest.mark.parametrize("element", [f32, f64, bf16, f16], ids=str)
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_softmax(element, rows):
    for n, m in [(3, 10), (5, 64), (33, 100), (2, 5000)]:
        values = data(element, n * m) * 5
        check(softmax(n, m, element, rows), [values, torch.zeros_like(values)], rtol=1e-5)


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_softmax_with_symbols(rows):
    kernel = softmax("n", "m", rows=rows, symbols=["n", "m"])
    for n, m in [(3, 10), (5, 64), (33, 100), (2, 5000), (0, 5)]:
        check(kernel, [data(f32, n * m), torch.zeros(n * m)], [n, m], rtol=1e-5)


def test_layer_norm_with_a_parallel_vector_axis():
    """A row's statistics do not vary along the vector axis j: they are computed once, before its loop."""
    n, m = 7, 100
    k = KernelBuilder("norm")
    i, j, r = k.axis("i", n), k.axis("j", m), k.axis("r", m, reduce=True)
    x, w, o, stat = (k.buffer(f32) for _ in range(4))
    a = k.load(x, i * m + r)
    scale = k.constant(1.0 / m, f32)
    mean = k.apply("mul", k.reduce("sum", a, "r"), scale)
    d = k.apply("sub", a, mean)
    var = k.apply("mul", k.reduce("sum", k.apply("mul", d, d), "r"), scale)
    inverse = k.apply("rsqrt", k.apply("add", var, k.constant(1e-5, f32)))
    y = k.apply("mul", k.apply("sub", k.load(x, i * m + j), mean), inverse)
    k.store(k.apply("mul", y, k.load(w, j)), o, i * m + j)
    k.store(mean, stat, i)
    check(k.finish(), [data(f32, n, m), data(f32, m, seed=1), torch.zeros(n, m), torch.zeros(n)],
          schedule=Schedule(extra=(("vector", "j"),)), rtol=1e-5, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_scan(kind, rows):
    n, m = 20, 90
    k = KernelBuilder("scan")
    i, r = k.axis("i", n), k.axis("r", m, reduce=True)
    x, o, total = k.buffer(f32), k.buffer(f32), k.buffer(f32)
    at = i * m + r if rows else r * n + i
    v = k.scan(kind, k.load(x, at), "r")
    k.store(v, o, at)
    k.store(k.reduce("max", v, "r"), total, i)
    values = 1 + data(f32, n * m) / 100
    check(k.finish(), [values, torch.zeros(n * m), torch.zeros(n)], rtol=1e-5)


def test_contract():
    n, m, q = 9, 33, 20
    k = KernelBuilder("product")
    i, j, r = k.axis("i", n), k.axis("j", m), k.axis("r", q, reduce=True)
    a, b, o = k.buffer(bf16), k.buffer(bf16), k.buffer(f32)
    k.store(k.contract(k.load(a, i * q + r), k.load(b, r * m + j), "r"), o, i * m + j)
    kernel = k.finish()
    for axis in "jr":
        check(kernel, [data(bf16, n, q), data(bf16, q, m, seed=1), torch.zeros(n, m)], rtol=1e-5,
              schedule=Schedule(extra=(("vector", axis),)))  # fmt: skip


def few_rows(n: int, m: int, depth: int, flipped: bool = False) -> tuple[KernelOp, list[torch.Tensor]]:
    """A linear layer with what is computed after it, as the product kernels take it."""
    k = KernelBuilder("few_rows")
    axes = {a: k.axis(a, size) for a, size in (("j", m), ("i", n))[:: 1 if flipped else -1]}
    i, j, r = axes["i"], axes["j"], k.axis("r", depth, reduce=True)
    x, w, bias, more, o, twice = (k.buffer(f32) for _ in range(6))
    y = k.apply("add", k.contract(k.load(x, i * depth + r), k.load(w, j * depth + r), "r"), k.load(bias, j))
    k.store(k.apply("add", y, k.load(more, i * m + j)), o, i * m + j)
    k.store(k.apply("mul", y, k.load(x, i * depth)), twice, i * m + j)
    shapes = ((n, depth), (m, depth), (m,), (n, m), (n, m), (n, m))
    return k.finish(), [data(f32, *shape, seed=s) for s, shape in enumerate(shapes)]


PRODUCTS = [(16, 64, 32), (13, 208, 16), (40, 16, 512), (64, 80, 48), (8, 32, 16), (3, 16, 32), (5, 16, 16)]


@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_product_with_few_rows(sizes):
    """By blocks wherever the machine multiplies and adds at once, with whole registers or with empty lanes."""
    for flipped in (False, True):
        kernel, tensors = few_rows(*sizes, flipped=flipped)
        check(kernel, tensors, rtol=1e-4, atol=1e-4)
        assert ("%block" in TARGET.compile(kernel, PLAIN).source) == TARGET.host.fma


def test_product_on_several_threads():
    kernel, tensors = few_rows(48, 512, 128)
    run, before, found = TARGET.compile(kernel, PLAIN), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append([t.clone() for t in tensors])
            run(found[-1], [])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_long_sums_stay_exact_enough(rows):
    """A million equal numbers: one accumulator would lose two digits."""
    m = 1 << 20
    k = KernelBuilder("long")
    i, r = k.axis("i", 1), k.axis("r", m, reduce=True)
    x, o = k.buffer(f32), k.buffer(f32)
    k.store(k.reduce("sum", k.load(x, i * m + r if rows else r + i), "r"), o, i)
    kernel, x = k.finish(), torch.full((m,), 0.1)
    out = torch.zeros(1)
    TARGET.compile(kernel, Schedule(extra=(("vector", "r" if rows else "i"),)))([x, out])
    want = x.double().sum().item()
    assert abs(out.item() - want) <= 4e-6 * want


# --- the kernels that every target must run ---


@pytest.mark.parametrize("case", [*kernels.cases(), *kernels.sequential_cases()], ids=lambda case: case.name)
def test_shared_case(case):
    sizes = dict(zip([s.data for s in case.kernel.symbol_names], case.symbols, strict=True))
    results = [t.clone() for t in case.tensors]
    TARGET.compile(case.kernel, TARGET.propose(case.kernel, sizes)[0])(results, case.symbols)
    case.check(results)


# --- random kernels ---


def random_kernel(seed: int) -> tuple[KernelOp, list[torch.Tensor], Schedule]:
    """A few loads over two parallel axes and a reduced one, a tree of functions, a reduction or two, stores."""
    pick = random.Random(seed)
    n, m, q = pick.choice([1, 3, 17]), pick.choice([1, 5, 16, 40, 130]), pick.choice([1, 8, 33, 70])
    k = KernelBuilder("random")
    i, j = k.axis("i", n), k.axis("j", m)
    r = k.axis("r", q, reduce=True)
    offsets = [
        lambda: ((i * m + j) * q + r, n * m * q),
        lambda: ((i * q + r) * m + j, n * m * q),
        lambda: (r * m + j, q * m),
        lambda: (i * q + r, n * q),
        lambda: (i * m + j, n * m),
        lambda: (j, m),
        lambda: (i, n),
        lambda: (j // 2 + r, m + q),
        lambda: ((j + r) % 16, 16),
    ]
    tensors, pool = [], []
    for t in range(pick.randint(2, 4)):
        offset, length = pick.choice(offsets)()
        pool.append(k.load(k.buffer(f32), offset))
        tensors.append(data(f32, length, seed=seed * 10 + t))
    kinds = ["add", "mul", "sub", "maximum", "minimum", "tanh", "sigmoid", "abs", "neg", "exp"]
    for step in range(pick.randint(2, 8)):
        fn = pick.choice(kinds)
        args = [pick.choice(pool) for _ in range(FUNCTIONS[fn].arity)]
        if fn == "exp":
            args = [k.apply("minimum", args[0], k.constant(1.0, f32))]
        pool.append(k.apply(fn, *args))
        if step % 3 == 2:
            varying = [v for v in pool if "r" in v.type.axis_names]
            if varying:
                pool.append(k.reduce(pick.choice(["sum", "max", "min"]), pick.choice(varying), "r"))
    for v in pool[-3:]:
        axes = v.type.axis_names
        where, length = 0 * i, 1
        for a, index, size in (("i", i, n), ("j", j, m), ("r", r, q)):
            if a in axes:
                where, length = where * size + index, length * size
        k.store(v, k.buffer(f32), where)
        tensors.append(torch.zeros(length))
    schedule = Schedule(extra=(("vector", pick.choice("ijr ")), ("lanes", pick.choice([0, 16, 64]))))
    return k.finish(), tensors, schedule


@pytest.mark.parametrize("seed", range(40))
def test_random_kernel(seed):
    kernel, tensors, schedule = random_kernel(seed)
    check(kernel, tensors, schedule=schedule, rtol=2e-4, atol=2e-4)


# --- mathematics ---

ULPS = {
    "exp": 2, "exp2": 2, "expm1": 2, "log": 2, "log2": 2, "log10": 2, "log1p": 2, "tanh": 2, "erf": 2,
    "sigmoid": 2, "rsqrt": 2, "sin": 2, "cos": 2,
}  # fmt: skip
EDGES = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-40, -1e-40, 1.17549435e-38,
         88.72283, 88.72284, 88.73, 103.97, -87.33, -87.34, -88.5, -103.0, -103.97, -103.98, -104.0, -110.0,
         127.99999, 128.0, -126.0, -149.0, -149.5, -150.0, -151.0, 3.4e38, -3.4e38, 0.625, 0.921875, 3.9, 4.0, 4.1,
         9.0, 9.4, 9.5, -17.3, -18.0, -0.9999999, 38999.0, 39001.0, 1e10, 1e30]  # fmt: skip


def dense() -> torch.Tensor:
    """Every 4,099th float32 there is (about a million), denser around the interesting numbers, and the edges."""
    bits = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32).view(torch.float32)
    return torch.cat([bits, torch.linspace(-12, 12, 200_001), torch.linspace(-110, 92, 100_001), torch.tensor(EDGES)])


def ulps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance in units in the last place of the true value, given in double."""
    rounded = want.float()
    assert torch.equal(got.isnan(), rounded.isnan())
    size = rounded.abs().clamp(2.0**-126, 3.4028234e38)
    unit = torch.exp2(torch.floor(torch.log2(size.double()).clamp(-126, 127)) - 23)
    error = (got.double() - want).abs() / unit
    # where rounding may go either way, the largest float and infinity are neighbours
    same = (got == rounded) | got.isnan()
    return torch.where(same, torch.zeros_like(error), error)


@pytest.mark.parametrize("fn", ULPS)
def test_units_in_the_last_place(fn):
    x = dense()
    kernel, tensors = one_function(fn, f32, [x])
    TARGET.compile(kernel, Schedule())(tensors)
    want = FUNCTIONS[fn].reference(x.double())
    worst = ulps(tensors[-1], want)
    at = int(worst.argmax())
    assert worst[at] <= ULPS[fn], f"{fn}({x[at].item()!r}): {tensors[-1][at].item()!r}, {worst[at].item():.2f} ulps off"


@pytest.mark.parametrize("fn", ["exp", "erf", "tanh", "sin", "sigmoid", "expm1", "log1p"])
def test_sign_of_zero(fn):
    kernel, tensors = one_function(fn, f32, [torch.tensor([0.0, -0.0] * 20)])
    TARGET.compile(kernel, Schedule())(tensors)
    assert torch.equal(torch.signbit(tensors[-1]), torch.signbit(FUNCTIONS[fn].reference(tensors[0])))


def test_power_within_an_ulp():
    generator = torch.Generator().manual_seed(0)
    x = torch.exp(torch.randn(100_000, generator=generator) * 8)
    y = torch.randn(100_000, generator=generator) * 6
    grid = every_pair(torch.tensor([*EDGES[:20], 2.0, 3.0, -3.0, 0.5, -0.5, 1e9, 16777217.0, 3.5]), 2, torch.float32)
    x, y = torch.cat([x, grid[0]]), torch.cat([y, grid[1]])
    kernel, tensors = one_function("pow", f32, [x, y])
    TARGET.compile(kernel, Schedule())(tensors)
    worst = ulps(tensors[-1], torch.pow(x.double(), y.double()))
    at = int(worst.argmax())
    assert worst[at] <= 1, f"pow({x[at]}, {y[at]}) = {tensors[-1][at]}, {worst[at]:.2f} ulps off"


# --- machinery ---


def test_division_by_a_shared_divisor():
    x = torch.cat([data(f32, 100), POINTS["float"], torch.tensor([1e-40, 3e38])])
    for divisor in [3.0, 0.0, -0.0, math.inf, math.nan, 1e-40, 1e-44, 3e38, -7.1, 2.0**-120, 2.0**120]:
        k = KernelBuilder("divide")
        i = k.axis("i", x.numel())
        a, d, o = k.buffer(f32), k.buffer(f32), k.buffer(f32)
        k.store(k.apply("div", k.load(a, i), k.load(d, 0)), o, i)
        out = torch.zeros_like(x)
        TARGET.compile(k.finish(), Schedule())([x, torch.tensor([divisor]), out])
        want = x.double() / torch.tensor(divisor).double()
        assert torch.equal(out.isnan(), want.isnan())
        assert (ulps(out, want)).max() <= 1.5, divisor


def test_threads_give_the_same_result():
    kernel = softmax("n", "m", symbols=["n", "m"])
    x = data(f32, 300, 1000)
    alone, together = torch.zeros_like(x), torch.zeros_like(x)
    before = torch.get_num_threads()
    run = TARGET.compile(kernel, Schedule())
    try:
        torch.set_num_threads(1)
        run([x, alone], [300, 1000])
        torch.set_num_threads(4)
        run([x, together], [300, 1000])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together)


WALK, ALL = kernels.norm_backward(600, 200), kernels.full_sum(300_000)


@pytest.mark.parametrize("case", [WALK, ALL], ids=lambda case: case.name)
def test_shared_work_gives_the_same_result_on_any_number_of_threads(case):
    schedule = TARGET.propose(case.kernel, {})[0]
    assert schedule.split > 1
    run, before, found = TARGET.compile(case.kernel, schedule), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append([t.clone() for t in case.tensors])
            run(found[-1], [])
    finally:
        torch.set_num_threads(before)
    case.check(found[0], slack=4)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("parts", [1, 3, 64])
def test_walks_and_reductions_in_parts(parts):
    rows = (kernels.softmax(3, 70), kernels.rms_norm(2, 130, dynamic=True), kernels.cross_entropy(2, 1000))
    sums = (kernels.softmax_sums(), kernels.softmax_sums(fn="exp2", infinite="zero", dynamic=True))
    for case in (*kernels.sequential_cases(), kernels.full_sum(1001), kernels.column_sum(dynamic=True), *rows, *sums):
        results = [t.clone() for t in case.tensors]
        TARGET.compile(case.kernel, Schedule(split=parts))(results, case.symbols)
        case.check(results)


def test_wrong_arguments_are_refused():
    run = TARGET.compile(softmax(3, 4), Schedule())
    with pytest.raises(TypeError, match="softmax: expected 2 addresses and 0 sizes"):
        run([torch.zeros(3, 4)])
    with pytest.raises(TypeError):
        run.by_address("a", "b")


def test_proposals_are_the_same_every_time_and_run():
    kernel = softmax("n", "m", symbols=["n", "m"])
    sizes = {"n": 64, "m": 300}
    proposed = TARGET.propose(kernel, sizes)
    assert proposed and proposed == CpuTarget().propose(kernel, sizes)
    for schedule in proposed:
        check(kernel, [data(f32, 64, 300), torch.zeros(64, 300)], [64, 300], schedule=schedule, rtol=1e-5)


def test_compiled_once_a_process_and_kept_on_disk(monkeypatch):
    kernel = softmax(11, 13)
    first = CpuTarget()
    made = first.compile(kernel, Schedule())
    assert first.compile(kernel, Schedule()) is made
    assert "fmuladd" in made.source and "ret" in made.assembly()
    x = data(f32, 11, 13)
    monkeypatch.setattr(jit, "object_code", lambda text, machine: pytest.fail("compiled again"))
    out = torch.zeros_like(x)
    CpuTarget().compile(kernel, Schedule())([x, out])
    torch.testing.assert_close(out, x.softmax(1))
    monkeypatch.undo()
    for entry in cache.entries("cpu"):  # a damaged entry is the same as none
        entry.path.write_bytes(entry.path.read_bytes()[:-100])
    out.zero_()
    CpuTarget().compile(kernel, Schedule())([x, out])
    torch.testing.assert_close(out, x.softmax(1))


def test_unknown_function_is_named():
    kernel, _ = one_function("bit_and", f32, [torch.zeros(3), torch.zeros(3)])
    with pytest.raises(OptionError, match="bit_and"):
        TARGET.compile(kernel, Schedule())
