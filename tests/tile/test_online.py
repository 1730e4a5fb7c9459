"""Softmax sums in one walk: found where they stand, written out again, and right on every target at every edge."""

from __future__ import annotations

import itertools

import kernels
import pytest
import torch
from xdsl.utils.exceptions import VerifyException

from tessera.tile.dialect.build import KernelBuilder, bf16, f32, i32, i64
from tessera.tile.dialect.interp import run
from tessera.tile.dialect.ops import KernelOp, ReduceExpOp, ReduceOp, StoreOp
from tessera.tile.rewrites.offline import offline
from tessera.tile.rewrites.one_hot import one_hot
from tessera.tile.rewrites.online import online, with_reduce_exp
from tessera.tile.schedules.schedule import Schedule, plan
from tessera.tile.targets.cpu.target import CpuTarget

FORMS = list(itertools.product(("exp", "exp2"), ("itself", "zero")))
MAKERS = [
    kernels.softmax,
    kernels.cross_entropy,
    *(lambda f=f: kernels.softmax_sums(fn=f[0], infinite=f[1]) for f in FORMS),
]


def loops(kernel: KernelOp) -> int:
    return sum(step.axis is not None for step in plan(kernel))


def count(kernel: KernelOp, kind: type) -> int:
    return sum(isinstance(op, kind) for op in kernel.block.ops)


@pytest.mark.parametrize("make", MAKERS)
def test_there_and_back(make) -> None:
    case = make()
    for rewrites in ((online,), (offline,), (online, offline), (offline, online)):
        kernel = case.kernel.clone()
        for rewrite in rewrites:
            rewrite(kernel)
            kernel.verify()
        assert count(kernel, ReduceExpOp) == (rewrites[-1] is online)
        after = [t.clone() for t in case.tensors]
        run(kernel, after, case.symbols)
        case.check(after)


def test_one_loop_less() -> None:
    plain = kernels.cross_entropy().kernel
    joined = with_reduce_exp(plain)
    assert joined is not plain and (loops(plain), loops(joined)) == (2, 1)
    softmax = kernels.softmax().kernel
    assert (loops(softmax), loops(with_reduce_exp(softmax))) == (3, 2)
    assert with_reduce_exp(softmax, private=True) is softmax  # it stores the exponentials too


def test_other_sums_are_left() -> None:
    k = KernelBuilder("other")
    i, r = k.axis("i", 4), k.axis("r", 8, reduce=True)
    x = k.load(k.buffer(f32), i * 8 + r)
    y = k.load(k.buffer(f32), i * 8 + r)
    top = k.reduce("max", y, "r")
    k.store(k.reduce("sum", k.apply("exp", k.apply("sub", x, top)), "r"), k.buffer(f32), i)
    kernel = k.finish()
    assert with_reduce_exp(kernel) is kernel


def test_what_the_verifier_refuses() -> None:
    k = KernelBuilder("wrong")
    i, r = k.axis("i", 4), k.axis("r", 8, reduce=True)
    x = k.load(k.buffer(i32), i * 8 + r)
    k.reduce_exp(x, "r")
    with pytest.raises(VerifyException, match="expected floats"):
        k.finish()
    k = KernelBuilder("wrong")
    i, r = k.axis("i", 4), k.axis("r", 8, reduce=True)
    k.reduce_exp(k.load(k.buffer(f32), i * 8 + r), "r", "tanh")
    with pytest.raises(VerifyException, match="fn is exp or exp2"):
        k.finish()


@pytest.mark.parametrize("shape", [(9, 3), (9, 16), (9, 43), (8, 700), (8, 5000)])
@pytest.mark.parametrize(("fn", "infinite"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_cpu(shape: tuple[int, int], fn: str, infinite: str, dtype: torch.dtype) -> None:
    target = CpuTarget()
    case = kernels.softmax_sums(*shape, dtype, fn, infinite)
    after = [t.clone() for t in case.tensors]
    target.compile(case.kernel, Schedule())(after, case.symbols)
    case.check(after)


def test_along_columns_on_the_cpu() -> None:
    """Lanes lie along another axis than the reduced one."""
    n, m = 300, 37
    k = KernelBuilder("columns")
    j, r = k.axis("j", m), k.axis("r", n, reduce=True)
    x, y, z = (k.buffer(f32) for _ in range(3))
    top, total = k.reduce_exp(k.load(x, r * m + j), "r")
    k.store(top, y, j)
    k.store(total, z, j)
    a = kernels.rand(n, m) * 20
    out = [a, torch.zeros(m), torch.zeros(m)]
    CpuTarget().compile(k.finish(), Schedule())(out, [])
    torch.testing.assert_close(out[1], a.amax(0), rtol=0, atol=0)
    torch.testing.assert_close(out[2], (a - a.amax(0)).exp().sum(0))


# --- one-hot rows ---


def one_hot_kernel(n: int = 6, m: int = 10) -> KernelOp:
    """y[i, r] = onehot[i, r] * a[i] - x[i, r] * (the sum of that row)"""
    k = KernelBuilder("picked")
    i, r = k.axis("i", n), k.axis("r", m, reduce=True)
    x, t, a, y = k.buffer(f32), k.buffer(i64), k.buffer(f32), k.buffer(f32)
    hit = k.apply("eq", k.iota(r), k.load(t, i))
    row = k.apply("select", hit, k.load(a, i), k.constant(0.0, f32))
    total = k.reduce("sum", row, "r")
    k.store(k.apply("sub", row, k.apply("mul", k.load(x, i * m + r), total)), y, i * m + r)
    return k.finish()


def test_one_hot_sums_need_no_sum() -> None:
    kernel = one_hot_kernel()
    x, a = kernels.rand(6, 10), kernels.rand(6)
    t = torch.tensor([0, 9, -100, 10, 3, 3])
    want, got = torch.zeros(6, 10), torch.zeros(6, 10)
    run(kernel, [x, t, a, want])
    one_hot(kernel)
    kernel.verify()
    assert count(kernel, ReduceOp) == 0 and count(kernel, StoreOp) == 1 and loops(kernel) == 0
    assert kernel.axis_names("reduce") == ()
    run(kernel, [x, t, a, got])
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_one_hot_rows_that_were_rounded_need_no_sum() -> None:
    k = KernelBuilder("rounded")
    i, r = k.axis("i", 6), k.axis("r", 10, reduce=True)
    t, a, y = k.buffer(i64), k.buffer(f32), k.buffer(f32)
    row = k.apply("select", k.apply("eq", k.iota(r), k.load(t, i)), k.load(a, i), k.constant(0.0, f32))
    k.store(k.reduce("sum", k.cast(k.cast(row, bf16), f32), "r"), y, i)
    kernel = k.finish()
    numbers, targets = kernels.rand(6), torch.tensor([0, 9, -100, 10, 3, 3])
    want, got = torch.zeros(6), torch.zeros(6)
    run(kernel, [targets, numbers, want])
    one_hot(kernel)
    kernel.verify()
    assert count(kernel, ReduceOp) == 0
    run(kernel, [targets, numbers, got])
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(got[0], numbers[0].bfloat16().float(), rtol=0, atol=0)


def test_a_row_that_varies_is_still_summed() -> None:
    k = KernelBuilder("varies")
    i, r = k.axis("i", 6), k.axis("r", 10, reduce=True)
    hit = k.apply("eq", k.iota(r), k.load(k.buffer(i64), i))
    row = k.apply("select", hit, k.load(k.buffer(f32), r), k.constant(0.0, f32))
    k.store(k.reduce("sum", row, "r"), k.buffer(f32), i)
    kernel = k.finish()
    one_hot(kernel)
    assert count(kernel, ReduceOp) == 1
