"""Average pooling in kernels, forward and backward: random windows on every target, and what no kernel holds."""

from __future__ import annotations

import json
from pathlib import Path

import average_cases
import pytest
import torch
import torch.nn.functional as F
from interpreted import run_interpreted
from programs import on_cuda, trace_of

from tessera.executors import tile
from tessera.ir.equation import Equation
from tessera.tile.dialect.ops import ApplyOp, KernelOp, LoadOp
from tessera.tile.from_trace.region import lower, why_not
from tessera.tile.targets import missing
from tessera.util.config import override

ops = torch.ops.tessera


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))


@pytest.mark.parametrize(("mode", "start", "count"), [("interp", 0, 16), ("whole", 100, 6), ("cutile", 200, 6)])
def test_random_windows(mode: str, start: int, count: int) -> None:
    failures = average_cases.run(mode, range(start, start + count))
    assert not failures, "\n\n".join(failures[:3])


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["interp", "whole", "cutile"])
def test_more_random_windows(mode: str) -> None:
    failures = average_cases.run(mode, range(1000, 1150))
    assert not failures, "\n\n".join(failures[:3])


@pytest.mark.skipif(bool(missing("triton")), reason=missing("triton"))
@pytest.mark.parametrize(("start", "count"), [(303, 2), pytest.param(305, 10, marks=pytest.mark.sweep)])
def test_random_windows_in_tritons_interpreter(start: int, count: int) -> None:
    failures = json.loads(run_interpreted(average_cases.__file__, "triton", start, count).splitlines()[-1])
    assert not failures, "\n\n".join(failures[:3])


def kernel_of(fn, *args: torch.Tensor) -> KernelOp:  # noqa: ANN001
    return lower(trace_of(fn, *args)).kernel


def divisions(kernel: KernelOp) -> int:
    return sum(isinstance(op, ApplyOp) and op.fn.data == "div" for op in kernel.block.ops)


def test_windows_that_all_have_as_many_elements_count_none() -> None:
    x, g = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 4, 4)
    assert divisions(kernel_of(lambda x: F.avg_pool2d(x, 2), x)) == 1
    inside = kernel_of(lambda x: F.avg_pool2d(x, 3, 1, 1), x)  # padding counts
    assert divisions(inside) == 1
    backward = kernel_of(
        lambda g: ops.avg_pool_backward(g, [2, 3, 8, 8], [2, 2], [2, 2], [0, 0], *[False, True, None, False]), g
    )
    assert divisions(backward) == 1 and sum(isinstance(op, LoadOp) for op in backward.block.ops) == 1


def test_sums_of_negative_zeros_are_zero_as_in_pytorch() -> None:
    x = torch.full((1, 1, 4, 4), -0.0)
    (y,) = average_cases.built(lambda x: F.avg_pool2d(x, 2), "interp", x)
    assert not torch.signbit(y).any() and not torch.signbit(F.avg_pool2d(x, 2)).any()


def test_what_has_no_kernel_says_why() -> None:
    def equation(fn, *args: torch.Tensor) -> Equation:  # noqa: ANN001
        return trace_of(fn, *args).equations[0]

    assert "25" in why_not(equation(lambda x: F.avg_pool2d(x, 6), torch.randn(1, 2, 9, 9)))
    assert "integers" in why_not(equation(lambda x: F.avg_pool2d(x, 2), torch.arange(32).view(1, 2, 4, 4)))
    five = equation(lambda x: F.avg_pool2d(x, 5), torch.randn(1, 2, 9, 9))
    assert why_not(five) == "" and "large windows" in tile.refusal(five)  # by a CPU's


def test_windows_that_overlap_are_read_once_on_a_gpu() -> None:
    """Neither what comes before a pool nor a norm behind it is computed with it: a pool reads every point nine times,
    and a norm walks its rows twice. Arithmetic behind it is; a cast that only the norm reads is the norm's."""

    def mixed(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + scale * (F.avg_pool2d(x.tanh(), 3, 1, 1) - x)
        return y, F.layer_norm(y.flatten(1).float(), (8 * 32 * 32,))

    with override(machine="h200"):
        trace = tile.decompose(on_cuda(mixed, (64, 8, 32, 32), (1, 8, 1, 1)))
        regions = [[trace.equations[i].opname for i in region] for region in tile.regions(trace)]
    (pool,) = [names for names in regions if "avg_pool2d" in names]
    assert sorted(pool) == ["add", "avg_pool2d", "mul", "sub"]
    (norm,) = [names for names in regions if "var_mean" in names]
    assert "_to_copy" in norm


def test_what_was_pooled_is_not_saved() -> None:
    import tessera

    torch._dynamo.reset()
    fast = tessera.jit(lambda x: F.avg_pool2d(x.exp(), 2).sin().sum(), executors=["tile", "aten"], strict=True)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    (got,) = torch.autograd.grad(fast(x), x)
    (want,) = torch.autograd.grad(F.avg_pool2d(x.exp(), 2).sin().sum(), x)
    torch.testing.assert_close(got, want)
    backward = next(s.trace for s in tessera.stages(fast) if s.name == "backward")
    assert any("avg_pool_backward" in str(eqn.op) for eqn in backward.equations)
