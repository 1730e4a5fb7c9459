"""Lowering of regions: the kernel of a region, run by the reference interpreter, gives what eager PyTorch gives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from programs import trace_of

import tessera
from tessera.ir.interp import run
from tessera.tile.dialect import interp
from tessera.tile.dialect.index import name
from tessera.tile.dialect.ops import LoadOp, ReduceOp
from tessera.tile.from_trace.index import ONE, ZERO, Index, Ranges
from tessera.tile.from_trace.launch import launcher
from tessera.tile.from_trace.region import Unlowerable, lower
from tessera.util.names import names


def check(
    fn: Callable,
    *args: torch.Tensor,
    dynamic: tuple = (),
    along: tuple = (0,),
    tol: float | None = None,
    others: tuple = (),
):
    """Lower the whole of `fn`; `others` are arguments of other sizes for the same symbolic program."""
    trace = trace_of(fn, *args, dynamic=dynamic, along=along)
    lowered = lower(trace)
    launch = launcher(trace, lowered, lambda tensors, symbols: interp.run(lowered.kernel, tensors, symbols))
    for given in (args, *others):
        expected, got = run(trace, *given), launch(*given)
        for e, g in zip(expected, got, strict=True):
            assert e.dtype == g.dtype and e.shape == g.shape and e.stride() == g.stride()
            options = {} if tol is None else {"rtol": tol, "atol": tol}
            torch.testing.assert_close(g, e, equal_nan=True, **options)
    return lowered


def axes(lowered) -> dict[str, str]:  # noqa: ANN001
    return {a.axis.data: a.size.text.data for a in lowered.kernel.axes}


def loads(lowered) -> list[str]:  # noqa: ANN001
    return [op.at.text.data for op in lowered.kernel.block.ops if isinstance(op, LoadOp)]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(-20, 20, shape).to(dtype)


# --- index arithmetic ---


def test_divisions_undo_each_other() -> None:
    ranges = Ranges({"i": Index.of(6), "c": Index.of(64), "m": Index.of(384)})
    i, c, m = name("i"), name("c"), name("m")
    whole = i * 64 + c
    assert ranges.div(whole, Index.of(64)) == i and ranges.mod(whole, Index.of(64)) == c
    assert ranges.join(ranges.div(m, Index.of(64)) * 64 + ranges.mod(m, Index.of(64))) == m
    assert ranges.div(whole, Index.of(16)) == i * 4 + c // 16
    low, high = ranges.mod(whole, Index.of(16)), ranges.mod(ranges.div(whole, Index.of(16)), Index.of(4))
    assert ranges.join(low + high * 16) == c
    shapes = (Index.of(6), Index.of(64)), (Index.of(3), Index.of(128))
    assert ranges.reshape((i, c), *shapes) == (i // 2, (i % 2) * 64 + c)


def test_divisions_by_symbolic_sizes() -> None:
    n = name("s0")
    ranges = Ranges({"i": Index.of(4), "t": n, "c": Index.of(8), "m": n * 4})
    i, t, c = name("i"), name("t"), name("c")
    place = ranges.flatten((i, t, c), (Index.of(4), n, Index.of(8)))
    assert ranges.unflatten(place, (n * 4, Index.of(8))) == (i * n + t, c)
    assert ranges.unflatten(place, (Index.of(4), n, Index.of(8))) == (i, t, c)
    m = name("m")
    assert ranges.join(ranges.div(m, n) * n + ranges.mod(m, n)) == m
    assert ranges.within(t, n) and not ranges.within(t, n - 1)
    assert ranges.div(c, ONE) == c and ranges.mod(c, ONE) == ZERO


# --- pointwise ---

PAIRS = [
    ((4, 8), (4, 8)),
    ((4, 8), (8,)),
    ((4, 8), (4, 1)),
    ((4, 1), (1, 8)),
    ((3, 4, 5), (4, 1)),
    ((), (3,)),
    ((), ()),
    ((1,), (1,)),
    ((1, 1, 7), (5, 1)),
]


@pytest.mark.parametrize("shapes", PAIRS, ids=str)
def test_broadcasting(shapes: tuple) -> None:
    a, b = rand(*shapes[0]), rand(*shapes[1])
    check(lambda a, b: (a + b).relu() * 2 - torch.exp(-b) * a, a, b)


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    x, y = rand(5, 16, dtype=dtype), rand(16, dtype=dtype)
    check(lambda x, y: F.gelu(x) * torch.sigmoid(y), x, y, tol=2e-2 if dtype in FLOATS[2:] else None)


UNARY = names(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sigmoid tanh erf erfc sin cos tan asin acos atan sinh "
    "cosh neg abs sign square floor ceil trunc round frac isnan isinf isfinite logical_not sgn relu"
)


@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary(name: str) -> None:
    x = torch.tensor([0.0, -0.0, 0.5, 0.9, 2.5, -2.5, 3.5, math.inf, -math.inf, math.nan, 1e-30, 7.25])
    check(getattr(torch, name), x)


ACTIVATIONS = [
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.silu,
    F.softplus,
    F.elu,
    F.leaky_relu,
    F.hardswish,
    F.hardsigmoid,
    F.hardtanh,
    F.relu6,
    F.mish,
    lambda x: x.clamp(-0.5, 0.5),
    lambda x: x.clamp(min=0.1),
    lambda x: x**2 + x**3 + x.abs() ** 0.5 + x.abs() ** 1.7,
    lambda x: torch.where(x > 0, x, 0.0) + torch.where(x < 0, 1.0, x),
    lambda x: x.masked_fill(x > 0.3, -math.inf),
    lambda x: torch.nan_to_num(x / 0),
    lambda x: torch.tril(x) + torch.triu(x, 1) * 2,
    lambda x: torch.lerp(x, x * 2, 0.3) + torch.lerp(x, x * 3, 0.7),
    lambda x: torch.addcmul(x, x, x, value=0.5) + torch.addcdiv(x, x, x + 3, value=2),
    lambda x: x.atan2(x + 1) + torch.hypot(x, x + 2),
    lambda x: 1 - x + 2 / x,
]


@pytest.mark.parametrize("number", range(len(ACTIVATIONS)))
def test_activations(number: int) -> None:
    check(ACTIVATIONS[number], rand(6, 9))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_as_eager(dtype: torch.dtype) -> None:
    a, b = rand(40, dtype=dtype), rand(39, dtype=dtype)[:1].abs() + 3
    check(lambda a, b: (a + b, a * a * a, a // b, a % b, torch.fmod(a, b), a.abs(), a / b), a, b)
    check(lambda a, b: (a & b, a | b, a ^ b, ~a, a << 2, a >> 1), a, b)
    check(lambda a, b: (a.maximum(b), a < b, a == b, a.float() * 0.5, a.bool(), a + 1.5), a, b)
    check(lambda a, b: torch.div(a, b, rounding_mode="trunc") + a.square(), a, b)


def test_truth_values_as_eager() -> None:
    a, b = rand(30, dtype=torch.bool), rand(31, dtype=torch.bool)[:30]
    check(lambda a, b: (a + b, a * b, a & b, a | b, a ^ b, ~a, a < b, a + 1, a * 2.5, a.maximum(b)), a, b)
    check(lambda a, b: torch.where(a, b, False).to(torch.int64), a, b)


def test_promotion() -> None:
    i, f, h = rand(8, dtype=torch.int32), rand(8), rand(8, dtype=torch.bfloat16)
    scalar = torch.tensor(0.5, dtype=torch.float64)
    check(lambda i, f, h, s: (i + f, i * 0.5, f + s, h + f, h * 2, i > 0.5, h < f, i == s), i, f, h, scalar, tol=1e-2)


def test_casts() -> None:
    x = torch.tensor([-1.9, -0.5, 0.0, 0.5, 1.9, 300.7])
    check(lambda x: (x.to(torch.int32), x.bool(), x.double() * 3, x.half(), x.to(torch.int64).float()), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_to_16_bits_rounds_though_nothing_is_stored(dtype: torch.dtype) -> None:
    check(lambda x: (x * 3).to(dtype).float() + 1, rand(64))
    check(lambda x: (x.to(dtype).to(torch.float32) - x).abs().sum(0), rand(64))


# --- views ---


def test_strides_of_inputs_and_results() -> None:
    x = rand(6, 10)
    check(lambda x: x.t().exp(), x)
    check(lambda a: a.sin() * 2, rand(4, 6, 8).permute(2, 0, 1))
    check(lambda a, b: a + b, rand(6, 10)[::2, 1::3], rand(3, 3).t())
    check(lambda a: a * 2 + 1, rand(1, 5).expand(4, 5))


VIEWS = [
    lambda x: x.exp().view(4, 8, 4, 4).permute(0, 2, 1, 3) + 1,
    lambda x: (x * 2).reshape(32, 16).sin(),
    lambda x: (x * 2).transpose(0, 2).contiguous() + 1,
    lambda x: (x * 2).flatten()[3:200:7].exp(),
    lambda x: (x * 2)[:, 1:5].flip(1) + 1,
    lambda x: (x * 2)[1, :, -3].cos(),
    lambda x: x.exp().split(5, -1)[1] + (x * 3).split(5, -1)[2 - 1] * 2,
    lambda x: (x * 2).unbind(1)[3] * 3,
    lambda x: (x * 2).unsqueeze(1).expand(4, 3, 8, 16) * 2,
    lambda x: (x * 2).roll(3, 1) + x,
    lambda x: (x * 2).repeat(2, 1, 1) + 1,
    lambda x: torch.diagonal(x * 2, 1, 1, 2) + 1,
    lambda x: (x + 1).unfold(2, 4, 2) * 2,
    lambda x: (x + 1).chunk(4, 2)[2].squeeze() * 2,
    lambda x: (x * 2).movedim(0, 2).mul(3),
    lambda x: (x * 2).unflatten(2, (2, 8)).swapaxes(1, 2).tanh(),
    lambda x: F.pad(x * 2, (1, 2, 0, 3), value=7.0) + 1,
    lambda x: torch.cat([x * 2, x[:, :3] + 1, x.exp()], 1).sin(),
    lambda x: torch.stack([x * 2, x + 1], 2) * 3,
    lambda x: torch.slice_scatter(x * 2, x[:, 2:6:2] + 1, 1, 2, 6, 2) + 1,
    lambda x: torch.select_scatter(x * 2, x[:, 2] + 1, 1, -2) + 1,
    lambda x: torch.cat([-x[..., 8:], x[..., :8]], -1) * x,
]


@pytest.mark.parametrize("number", range(len(VIEWS)))
def test_views_change_the_index_alone(number: int) -> None:
    check(VIEWS[number], rand(4, 8, 16))


def test_results_that_are_views_share_memory() -> None:
    trace = trace_of(lambda x: ((y := x * 2), y.t(), y.view(-1)[2:5]), x := rand(4, 6))
    lowered = lower(trace)
    assert len(lowered.stored) == 1 and len(lowered.tail) == 3
    y, t, v = launcher(trace, lowered, lambda tensors, symbols: interp.run(lowered.kernel, tensors, symbols))(x)
    assert t.data_ptr() == y.data_ptr() and v.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    torch.testing.assert_close(v, (x * 2).view(-1)[2:5])


def test_axes_are_joined() -> None:
    assert axes(check(lambda x, y: x * y + 1, rand(4, 5, 6), rand(4, 5, 6))) == {"i0": "120"}
    assert axes(check(lambda x, y: x * y + 1, rand(4, 5, 6), rand(6))) == {"i0": "20", "i1": "6"}
    assert axes(check(lambda x: x.t().contiguous() * 2, rand(4, 6))) == {"i0": "6", "i1": "4"}
    assert axes(check(lambda x: x - x.amax(-1, True), rand(3, 4, 6))) == {"i0": "12", "r": "6"}


def test_rotary_embedding_needs_no_division() -> None:
    def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x.view(2, 8, 4, 16).transpose(1, 2)
        half = torch.cat([-x[..., 8:], x[..., :8]], -1)
        return x * cos + half * sin

    lowered = check(rotary, rand(2, 8, 64), rand(8, 16), rand(8, 16, 1)[..., 0])
    assert not any("//" in at or "%" in at for at in loads(lowered))


# --- reductions ---

REDUCTIONS = [
    lambda x: x.sum(-1),
    lambda x: x.sum((0, 1), keepdim=True),
    lambda x: x.sum(),
    lambda x: x.mean((0, 2)),
    lambda x: x.amax(1, keepdim=True),
    lambda x: (x * 2).amin((1, 2)),
    lambda x: x.argmax(-1),
    lambda x: x.argmin(1, keepdim=True),
    lambda x: x.argmax(),
    lambda x: x.max(2),
    lambda x: x.min(0),
    lambda x: x.max(),
    lambda x: x.prod(1),
    lambda x: (x > 0).any(-1),
    lambda x: (x > -3).all(),
    lambda x: (x > 0).sum(1),
    lambda x: torch.var_mean(x, -1),
    lambda x: x.var((1, 2), correction=0),
    lambda x: x.std(0, keepdim=True),
    lambda x: torch.logsumexp(x, -1),
    lambda x: torch.linalg.vector_norm(x, 2, -1),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: (x.exp().sum(-1), x.amax(-1), x.exp() * 2),
    lambda x: (x.view(32, 16).sum(1), x.amax(-1, keepdim=True) - x),
    lambda x: x.transpose(1, 2).sum(1).sin(),
    lambda x: x.cumsum(-1) * 2,
    lambda x: (x * 2).cumsum(1) + x,
    lambda x: (s := x.cumsum(-1), torch.slice_scatter(s, -s[..., 3:], -1, 3)),
    lambda x: (s := (x * 2).cumsum(-1), F.pad(s[..., 2:-1], (2, 1))),
    lambda x: x.sum(-1, keepdim=True).expand(4, 8, 16) + 1,
    lambda x: torch.cat([x.sum(-1, keepdim=True), x[..., 1:]], -1),
    lambda x: x[..., None].sum(-1) * 2,
]


@pytest.mark.parametrize("number", range(len(REDUCTIONS)))
def test_reductions(number: int) -> None:
    check(REDUCTIONS[number], rand(4, 8, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool], ids=str)
def test_reductions_in_other_dtypes(dtype: torch.dtype) -> None:
    x = rand(6, 40, dtype=dtype)
    check(lambda x: (x.sum(1), x.sum(1, dtype=torch.float32)), x, tol=5e-2 if dtype in FLOATS[2:] else None)
    if dtype.is_floating_point:
        check(lambda x: (x.mean(0), x.amax(0)), x, tol=2e-2 if dtype in FLOATS[2:] else None)


def test_reductions_of_truth_values() -> None:
    x = rand(6, 40, dtype=torch.bool)
    check(lambda x: (x.amax(1), x.amin(1), x.sum(1), x.any(1), x.all(1), x.max(1)), x)


def softmax(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def test_softmax_reads_once_and_reduces_twice() -> None:
    lowered = check(softmax, rand(4, 8, 33))
    assert len(loads(lowered)) == 1
    assert sum(isinstance(op, ReduceOp) for op in lowered.kernel.block.ops) == 2


def test_nan_and_infinity_in_reductions() -> None:
    x = rand(4, 8)
    x[0, 3], x[1, 2], x[2, 1] = math.nan, math.inf, -math.inf
    check(lambda x: (x.amax(1), x.amin(1), x.argmax(1), x.sum(1), torch.logsumexp(x, 1)), x)


# --- gathers and sources ---


def test_gathers() -> None:
    w, ids = rand(10, 6), torch.tensor([[1, 9, 0], [3, 3, 2]])
    check(lambda w, ids: F.embedding(ids, w) * 2 + 1, w, ids)
    check(lambda w, ids: w[ids, 1:4].exp(), w, ids - 5)
    check(lambda w, ids: (w * 2)[:, ids[0]] + 1, w, ids - 4)
    check(lambda w, ids: torch.gather(w * 2, 1, ids.t() % 6), w, ids)
    check(lambda w, ids: (w + 1).index_select(0, ids[1]), w, ids)
    check(lambda w, ids: (w[0, 0] + 1).index_select(0, ids[1, 1] * 0) * 2, w, ids)


def test_gather_from_a_softmax_reads_one_element_a_row() -> None:
    x, target = rand(6, 10), torch.tensor([1, 9, 0, 3, 3, 2])

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        top = x.amax(-1, keepdim=True)
        logs = x - top - (x - top).exp().sum(-1, keepdim=True).log()
        return -logs.gather(1, target[:, None])

    check(loss, x, target)


def test_an_index_out_of_bounds_touches_no_memory() -> None:
    trace = trace_of(lambda w, i: F.embedding(i, w) * 2, w := rand(4, 3), torch.tensor([1, 3]))
    lowered = lower(trace)
    launch = launcher(trace, lowered, lambda tensors, symbols: interp.run(lowered.kernel, tensors, symbols))
    got = launch(w, torch.tensor([2, 4]))[0]
    assert torch.equal(got[0], w[2] * 2) and got[1].isnan().all()


def test_sources() -> None:
    check(lambda x: x + torch.arange(6) * 2 + torch.ones(4, 1) + torch.full((6,), 2.5), rand(4, 6))
    check(lambda x: torch.zeros_like(x) + torch.arange(1, 7, 1.0) + torch.arange(3, 15, 2), rand(4, 6))
    check(lambda x: torch.where(torch.arange(6)[None] <= torch.arange(4)[:, None], x, -math.inf), rand(4, 6))


# --- symbolic sizes ---


def test_symbolic_sizes() -> None:
    more = lambda *shape: tuple((rand(n, *shape),) for n in (2, 5, 9))  # noqa: E731
    check(lambda x: x.exp() + 1, rand(4, 8), dynamic=(0,), others=more(8))
    check(lambda x: x.view(-1, 2, 4).transpose(0, 1).contiguous() * 2, rand(4, 8), dynamic=(0,), others=more(8))
    check(lambda x: softmax(x.flatten(0, 1)), rand(4, 3, 8), dynamic=(0,), others=more(3, 8))
    check(lambda x: (x * 2).sum(0), rand(4, 8), dynamic=(0,), others=more(8))
    check(lambda x: x.mean((0, 1)), rand(4, 3, 8), dynamic=(0,), others=more(3, 8))
    check(lambda x: torch.cat([x, x * 2], 0)[1:] + 1, rand(4, 8), dynamic=(0,), others=more(8))
    check(lambda x: x + torch.arange(x.shape[0])[:, None], rand(4, 8), dynamic=(0,), others=more(8))
    check(lambda x: x * x.shape[0] + x.sum(0) / x.shape[0], rand(4, 8), dynamic=(0,), others=more(8))
    check(lambda x, y: x.t() * y, rand(4, 8), rand(8, 1), dynamic=(0,), others=((rand(7, 8), rand(8, 1)),))


def test_reductions_over_several_symbolic_sizes() -> None:
    """The reduced axis is divided by sizes then, and those are symbols, not axes."""
    others = ((rand(2, 5, 9, 4),), (rand(4, 3, 3, 11),), (rand(5, 16, 2, 2),))
    for dims in ((0, 2, 3), (2, 3), (1, 2), (0, 1), (0, 2), (1, 3), (1, 2, 3)):
        for reduced in (torch.sum, torch.mean, torch.amax):
            fn = functools.partial(lambda x, of, over: of(x * 2 + 1, over), of=reduced, over=dims)
            check(fn, rand(3, 8, 6, 7), dynamic=(0,), along=(0, 1, 2, 3), others=others)
        check(functools.partial(normal, over=dims), rand(3, 8, 6, 7), dynamic=(0,), along=(0, 1, 2, 3), others=others)


def normal(x: torch.Tensor, over: tuple[int, ...]) -> torch.Tensor:
    return (x - x.mean(over, keepdim=True)) * (x.square().mean(over, keepdim=True) + 1).rsqrt()


def test_places_counted_from_the_end_of_symbolic_sizes() -> None:
    short, long = ((rand(4, 8), rand(2)), (rand(3, 8), rand(2))), ((rand(9, 8), rand(4)), (rand(7, 8), rand(3)))
    for fn in (
        lambda x, y: (x * 2)[-5:-1] + 1,
        lambda x, y: torch.slice_scatter(x * 2, x[-5:-1] + 1, 0, -5, -1),
        lambda x, y: torch.select_scatter(x * 2, x[0], 0, -2) + 1,
    ):
        check(fn, *short[0], dynamic=(0,), others=short[1:])  # the slice begins before the beginning
        check(fn, *long[0], dynamic=(0,), others=long[1:])
    for fn in (
        lambda x, y: (x * 2)[-y.shape[0] :] + 1,
        lambda x, y: (x * 2)[: -y.shape[0]] + 1,
        lambda x, y: (x * 2).select(0, -y.shape[0]) + 1,
        lambda x, y: (x * 2).narrow(0, -y.shape[0], 2) + 1,
        lambda x, y: torch.slice_scatter(x * 2, x[: -y.shape[0]] + 1, 0, 0, -y.shape[0]),
        lambda x, y: torch.select_scatter(x * 2, x[0], 0, -y.shape[0]) + 1,
    ):
        check(fn, *long[0], dynamic=(0, 1), others=long[1:])


def test_a_symbolic_size_that_guards_make_one_is_broadcast() -> None:
    few = ((rand(3, 8),), (rand(2, 8),))
    check(lambda x: x.t() + (x * 2)[::3].t(), *few[0], dynamic=(0,), others=few[1:])
    check(lambda x: ((x * 2)[::3].expand(5, 8), x * 3), *few[0], dynamic=(0,), others=few[1:])
    check(lambda x: x + (x * 2)[-1:].cumsum(0), *few[0], dynamic=(0,), others=few[1:])


# --- along the rows, and over them ---


def both_ways(x: torch.Tensor, w: torch.Tensor) -> tuple:
    y = (x - x.mean(-1, keepdim=True)) * w
    over = tuple(range(x.ndim - 1))
    return y, (y * x).sum(over), y.sum(over, keepdim=True) * 2 + w, x.mean(over).to(torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_over_the_rows_beside_reductions_along_them(dtype: torch.dtype) -> None:
    tol = 0.06 if dtype is torch.bfloat16 else None  # eager rounds more often
    for shape in ((5, 7), (2, 3, 4), (3, 1, 5), (2, 2, 2, 3)):
        check(both_ways, rand(*shape).to(dtype), rand(shape[-1]).to(dtype), tol=tol)
    check(both_ways, rand(5, 3, 7).transpose(0, 1).to(dtype), rand(7).to(dtype), tol=tol)
    check(both_ways, rand(6, 5, 8)[::2, 1:, ::2].to(dtype), rand(4).to(dtype), tol=tol)
    check(lambda x: (x.sum(0), x.sum(1)), rand(6, 6).to(dtype))
    check(lambda x: (x.reshape(12, 5).sum(0), x.amax(-1)), rand(3, 4, 5).to(dtype))


def test_sums_over_so_many_rows() -> None:
    check(both_ways, rand(4, 8), rand(8), dynamic=(0,), others=((rand(9, 8), rand(8)), (rand(2, 8), rand(8))))


# --- what has no kernel ---


def test_regions_without_a_kernel_say_why() -> None:
    def refused(fn: Callable, *args: torch.Tensor) -> str:
        with pytest.raises(Unlowerable) as error:
            lower(trace_of(fn, *args))
        return str(error.value)

    x = rand(6, 6)
    assert "no lowering" in refused(lambda x: x.cholesky_inverse(), x)
    assert "and is no sum" in refused(lambda x: (x.amax(0), x.sum(1)), x)
    assert "sum over the rows first" in refused(lambda x: (x.mean(1), x * x.sum(0)), x)
    assert "reduces sums over the rows again" in refused(lambda x: (x.mean(1), x.sum(0).sum()), x)
    assert "every step of another reduction" in refused(lambda x: (x - x.sum(1)).amax(1), x)
    assert "no elements" in refused(lambda x: x[:0] * 2, x)
    assert "shape" in refused(lambda x, y: (x * 2, y * 2), x, rand(5))
    assert "c64" in refused(lambda x: x * 2, torch.zeros(3, dtype=torch.complex64))


def test_inputs_with_other_strides_are_copied() -> None:
    trace = trace_of(lambda x: x * 2, rand(4, 6))
    lowered = lower(trace)
    launch = launcher(trace, lowered, lambda tensors, symbols: interp.run(lowered.kernel, tensors, symbols))
    x = rand(6, 4).t()
    torch.testing.assert_close(launch(x)[0], x * 2)


def test_reduced_dimensions_are_walked_as_memory_lies() -> None:
    x = rand(3, 4, 5, 6).to(memory_format=torch.channels_last)
    for fn in (lambda x: x.sum((1, 2, 3)), lambda x: torch.var_mean(x, (1, 2, 3), correction=0)[0]):
        lowered = check(fn, x, tol=1e-5)
        assert set(loads(lowered)) == {"i0 * 120 + r"}
    scattered = check(lambda x: x.flatten(1).argmax(1), rand(3, 120))
    assert loads(scattered) == ["i0 * 120 + r"]  # where an order is asked for, it is the elements' own


@pytest.mark.parametrize("start", [lambda n: (-3) % n, lambda n: (3 - n) // 2 + n], ids=["remainder", "quotient"])
def test_a_size_that_divides_a_negative_number_is_in_no_kernel(start: Callable) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        s = start(x.shape[0])
        return torch.cat([x[s:], x[:s]]) * 2

    with pytest.raises(Unlowerable, match="may be negative"):
        lower(trace_of(fn, torch.randn(8), dynamic=(0,)))


def test_cats_of_cats_are_no_kernel_of_all_ways_through_them() -> None:
    """Each doubles the places at which the innermost is read; fusion stops before that is more than code can hold."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        for _ in range(9):
            x = torch.cat([x, x.sin()])
        return x

    x = torch.randn(4)
    torch.testing.assert_close(tessera.jit(doubled)(x), doubled(x))
