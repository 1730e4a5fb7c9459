"""The tile interpreter against eager PyTorch, operation by operation and on whole kernels."""

from __future__ import annotations

import math

import pytest
import torch
from tile_kernels import attention, matmul, pointwise, rms_norm, softmax

from tessera.tile.dialect.build import KernelBuilder, bf16, f32, f64, i1, i8, i32, i64
from tessera.tile.dialect.elements import element_of_dtype
from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.index import gathered
from tessera.tile.dialect.interp import philox, run
from tessera.tile.dialect.ops import KernelOp
from tessera.util.errors import InputError


def test_pointwise_broadcasts_by_axis_name() -> None:
    x, y = torch.randn(3, 5), torch.randn(5)
    out = torch.empty(3, 5)
    run(pointwise("gelu_like"), [x, y, out], [3, 5])
    torch.testing.assert_close(out, (x + y) * torch.sigmoid(x + y))


@pytest.mark.parametrize("shape", [(4, 7), (1, 1), (0, 7), (4, 0)])
def test_softmax(shape: tuple[int, int]) -> None:
    x = torch.randn(shape).mul_(10)
    out = torch.empty(shape)
    run(softmax(), [x, out], list(shape))
    torch.testing.assert_close(out, x.softmax(-1))


def test_softmax_of_masked_rows_is_nan_as_in_eager() -> None:
    x = torch.randn(3, 4)
    x[1] = -math.inf
    x[2, 0] = math.nan
    out = torch.empty(3, 4)
    run(softmax(), [x, out], [3, 4])
    torch.testing.assert_close(out, x.softmax(-1), equal_nan=True)


def test_rms_norm_of_bf16_rounds_once() -> None:
    x, w = torch.randn(6, 32).bfloat16(), torch.randn(32).bfloat16()
    out = torch.empty_like(x)
    run(rms_norm(), [x, w, out], [6, 32])
    wide = x.float()
    want = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w.float()).bfloat16()
    torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2)
    assert (out == want).float().mean() > 0.98


@pytest.mark.parametrize("m, n, k", [(4, 6, 5), (1, 1, 1), (4, 6, 0), (0, 6, 5)])
def test_matmul_with_epilogue(m: int, n: int, k: int) -> None:
    a, b, bias = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.randn(n).bfloat16()
    out = torch.empty(m, n, dtype=torch.bfloat16)
    run(matmul(), [a, b, bias, out], [m, n, k])
    torch.testing.assert_close(out, torch.relu(a.double() @ b.double() + bias.double()).bfloat16())


def test_matmul_of_batches() -> None:
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    k = KernelBuilder("bmm")
    z, i, j, r = k.axis("z", 3), k.axis("i", 4), k.axis("j", 6), k.axis("r", 5, reduce=True)
    p, q, out = k.buffer(f32), k.buffer(f32), k.buffer(f32)
    c = k.contract(k.load(p, z * 20 + i * 5 + r), k.load(q, z * 30 + r * 6 + j), "r")
    k.store(c, out, z * 24 + i * 6 + j)
    got = torch.empty(3, 4, 6)
    run(k.finish(), [a, b, got])
    torch.testing.assert_close(got, a @ b)


def test_attention_of_one_head() -> None:
    q, key, v = (torch.randn(6, 8) for _ in range(3))
    out = torch.empty(6, 8)
    run(attention(6, 6, 8), [q, key, v, out], [])
    want = torch.nn.functional.scaled_dot_product_attention(q[None], key[None], v[None])[0]
    torch.testing.assert_close(out, want)


# --- memory ---


def test_offsets_count_from_the_first_element_of_a_view() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    view, out = base[1:, 2:], torch.zeros(3)
    k = KernelBuilder("column")
    i = k.axis("i", 3)
    x, y = k.buffer(f32), k.buffer(f32)
    k.store(k.load(x, i * 6), y, i)
    run(k.finish(), [view, out])
    assert out.tolist() == view[:, 0].tolist()


def test_gather_and_masks() -> None:
    table, index = torch.randn(5, 3), torch.tensor([4, -1, 0])
    k = KernelBuilder("embedding")
    i, j = k.axis("i", 3), k.axis("j", 3)
    x, ids, out = k.buffer(f32), k.buffer(i64), k.buffer(f32)
    row = k.load(ids, i)
    inside = k.apply("ge", row, k.constant(0, i64))
    got = k.load(x, gathered(0) * 3 + j, [row], mask=inside, other=k.constant(7.0, f32))
    k.store(got, out, i * 3 + j)
    result = torch.empty(3, 3)
    run(k.finish(), [table, index, result])
    assert torch.equal(result, torch.stack([table[4], torch.full((3,), 7.0), table[0]]))


def test_a_masked_load_without_other_gives_zero_even_of_an_empty_tensor() -> None:
    k = KernelBuilder("nothing")
    i = k.axis("i", 2)
    x, out = k.buffer(f32), k.buffer(f32)
    k.store(k.load(x, i, mask=k.constant(False, i1)), out, i)
    result = torch.ones(2)
    run(k.finish(), [torch.empty(0), result])
    assert result.tolist() == [0, 0]


def test_stores_add_up_and_respect_their_mask() -> None:
    k = KernelBuilder("scatter")
    i = k.axis("i", 4)
    x, ids, out = k.buffer(f32), k.buffer(i64), k.buffer(f32)
    where, value = k.load(ids, i), k.load(x, i)
    k.store(value, out, gathered(0), [where], mask=k.apply("gt", value, k.constant(0.0, f32)), mode="add")
    result = torch.zeros(3)
    run(k.finish(), [torch.tensor([1.0, 2.0, -5.0, 4.0]), torch.tensor([2, 0, 0, 2]), result])
    assert result.tolist() == [2, 0, 5]


def test_an_access_outside_the_storage_is_refused() -> None:
    k = KernelBuilder("outside")
    i = k.axis("i", 4)
    x, out = k.buffer(f32), k.buffer(f32)
    k.store(k.load(x, i + 1), out, i)
    with pytest.raises(InputError, match=r"expected offsets in \[0, 4\), got 1 … 4"):
        run(k.finish(), [torch.zeros(4), torch.zeros(4)])


def test_the_wrong_tensors_are_refused() -> None:
    kernel = softmax()
    with pytest.raises(InputError, match="expected 2 tensors, got 1"):
        run(kernel, [torch.zeros(2)], [1, 2])
    with pytest.raises(InputError, match="expected a tensor of torch.float32 for buffer 1, got torch.float64"):
        run(kernel, [torch.zeros(2), torch.zeros(2).double()], [1, 2])
    with pytest.raises(InputError, match="n, m"):
        run(kernel, [torch.zeros(2), torch.zeros(2)], [1])


# --- operations ---


def unary(fn: str, element=f32, result=None) -> KernelOp:
    k = KernelBuilder("unary", symbols=["n"])
    i = k.axis("i", "n")
    x = k.buffer(element)
    y = k.apply(fn, k.load(x, i), element=result)
    k.store(y, k.buffer(y.type.element), i)
    return k.finish()


@pytest.mark.parametrize("fn", [f.name for f in FUNCTIONS.values() if f.arity == 1 and not f.name.startswith("bit")])
def test_functions_of_one_float(fn: str) -> None:
    x = torch.tensor([-2.5, -0.5, 0.0, 0.25, 0.5, 1.5, math.inf, math.nan])
    want = FUNCTIONS[fn].reference(x)
    got = torch.empty_like(want)
    run(unary(fn), [x, got], [8])
    torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min", "any", "all", "argmax", "argmin"])
@pytest.mark.parametrize("element, dtype", [(f32, torch.float32), (i64, torch.int64), (i1, torch.bool)])
def test_reductions(kind: str, element, dtype: torch.dtype) -> None:
    if dtype == torch.bool and kind in ("sum", "prod"):
        pytest.skip("truth values are cast before they are summed")
    x = torch.randint(-3, 3, (4, 9)).to(dtype)
    if dtype == torch.float32:
        x[2, 5] = math.nan
    k = KernelBuilder("reduce")
    i, r = k.axis("i", 4), k.axis("r", 9, reduce=True)
    source = k.buffer(element)
    value = k.load(source, i * 9 + r)
    if kind in ("any", "all"):
        value = k.cast(value, i1)
    y = k.reduce(kind, value, "r")
    k.store(y, k.buffer(y.type.element), i)
    as_integer = x.to(torch.uint8) if dtype == torch.bool else x
    want = {
        "sum": lambda: x.sum(1), "prod": lambda: x.prod(1), "max": lambda: x.amax(1), "min": lambda: x.amin(1),
        "any": lambda: x.bool().any(1), "all": lambda: x.bool().all(1),
        "argmax": lambda: as_integer.argmax(1), "argmin": lambda: as_integer.argmin(1),
    }[kind]()  # fmt: skip
    got = torch.empty_like(want)
    run(k.finish(), [x, got])
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("kind, want", [("sum", 0.0), ("prod", 1.0), ("max", -math.inf), ("min", math.inf)])
def test_reductions_of_nothing_give_what_changes_nothing(kind: str, want: float) -> None:
    k = KernelBuilder("reduce")
    i, r = k.axis("i", 2), k.axis("r", 0, reduce=True)
    source, out = k.buffer(f32), k.buffer(f32)
    k.store(k.reduce(kind, k.load(source, i + r), "r"), out, i)
    got = torch.full((2,), 5.0)
    run(k.finish(), [torch.empty(0), got])
    assert got.tolist() == [want, want]


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
def test_scans(kind: str) -> None:
    x = torch.randn(3, 6)
    k = KernelBuilder("scan")
    i, r = k.axis("i", 3), k.axis("r", 6, reduce=True)
    source, out = k.buffer(f32), k.buffer(f32)
    k.store(k.scan(kind, k.load(source, i * 6 + r), "r"), out, i * 6 + r)
    want = {"sum": x.cumsum(1), "prod": x.cumprod(1), "max": x.cummax(1).values, "min": x.cummin(1).values}[kind]
    got = torch.empty_like(x)
    run(k.finish(), [x, got])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("target", [torch.bool, torch.int8, torch.uint8, torch.int32, torch.float16, torch.bfloat16])
def test_casts_are_those_of_pytorch(target: torch.dtype) -> None:
    x = torch.tensor([0.0, 0.5, 1.7, 2.5, 100.3])
    k = KernelBuilder("cast")
    i = k.axis("i", 5)
    source, out = k.buffer(f32), k.buffer(element_of_dtype(target))
    k.store(k.cast(k.load(source, i), element_of_dtype(target)), out, i)
    got = torch.empty(5, dtype=target)
    run(k.finish(), [x, got])
    assert torch.equal(got, x.to(target))


def test_iota_constants_and_index_arithmetic() -> None:
    k = KernelBuilder("iota", symbols=["n"])
    i = k.axis("i", "n")
    out, small, truth = k.buffer(i64), k.buffer(i8), k.buffer(i1)
    k.store(k.iota(i * k.symbol("n") + i // 3 + i % 2), out, i)
    k.store(k.constant(-5, i8), small, i)
    k.store(k.constant(True, i1), truth, i)
    n = torch.arange(7)
    got = torch.empty(7, dtype=torch.int64), torch.empty(7, dtype=torch.int8), torch.zeros(7, dtype=torch.bool)
    run(k.finish(), list(got), [7])
    assert torch.equal(got[0], n * 7 + n // 3 + n % 2)
    assert got[1].tolist() == [-5] * 7 and got[2].all()


def test_a_kernel_without_axes_runs_once() -> None:
    k = KernelBuilder("scalar")
    x, out = k.buffer(f64), k.buffer(f64)
    k.store(k.apply("exp", k.load(x, 0)), out, 0)
    got = torch.zeros((), dtype=torch.float64)
    run(k.finish(), [torch.tensor(2.0, dtype=torch.float64), got])
    torch.testing.assert_close(got, torch.tensor(2.0, dtype=torch.float64).exp())


def test_f64_and_mixed_integer_kinds() -> None:
    k = KernelBuilder("mixed")
    i = k.axis("i", 3)
    x, out = k.buffer(i32), k.buffer(bf16)
    k.store(k.cast(k.apply("floordiv", k.load(x, i), k.constant(2, i32)), bf16), out, i)
    got = torch.empty(3, dtype=torch.bfloat16)
    run(k.finish(), [torch.tensor([-3, 3, 4], dtype=torch.int32), got])
    assert got.tolist() == [-2, 1, 2]


# The published vector of Philox 4x32-7 for a counter and a key of zeros, and two computed by the scalar definition.
def scalar_philox(seed: int, offset: int) -> int:
    word = 2**32 - 1
    c, key = [offset >> 2 & word, offset >> 34 & word, 0, 0], [seed & word, seed >> 32 & word]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & word, (a >> 32) ^ c[3] ^ key[1], a & word]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return c[offset % 4]


def test_random_bits_are_philox() -> None:
    assert scalar_philox(0, 0) == 0x5F6FB709
    seeds, offsets = torch.tensor([0, 42, 2**40 + 3, -1]), torch.tensor([0, 1, 2**33 + 5, 2**62])
    want = [scalar_philox(s % 2**64, o) for s, o in zip(seeds.tolist(), offsets.tolist(), strict=True)]
    assert philox(seeds, offsets).tolist() == want
    k = KernelBuilder("random")
    i = k.axis("i", 4)
    out = k.buffer(i64)
    k.store(k.random(k.constant(42, i64), k.iota(i)), out, i)
    got = torch.empty(4, dtype=torch.int64)
    run(k.finish(), [got])
    assert got.tolist() == [scalar_philox(42, n) for n in range(4)]
