"""Max pools over offsets: which are written so, that results stay the same, and why others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from programs import trace_of

from tessera.ir.interp import run
from tessera.ir.trace import Trace
from tessera.ir.verify import verify
from tessera.passes.decompose.pool_offsets import pool_offsets, reasons
from tessera.tile.from_trace.region import why_not

aten = torch.ops.aten
STEM = ([3, 3], [2, 2], [1, 1])


def images(*shape: int, last: bool = False) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    x = torch.randint(-4, 5, shape or (2, 3, 9, 10)).float()
    return x.to(memory_format=torch.channels_last) if last else x


def names(trace: Trace) -> list[str]:
    return [f"{e.op.namespace}.{e.op._opname}" for e in trace.equations]  # type: ignore[union-attr]


def written(fn: Callable, *args: torch.Tensor, dynamic: tuple[int, ...] = ()) -> Trace:
    """The program over offsets, which gives the same as before."""
    before = trace_of(fn, *args, dynamic=dynamic)
    after = pool_offsets(before, why_not)
    verify(after)
    for a, b in zip(run(after, *args), run(before, *args), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert a.stride() == b.stride()
    return after


def step(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool and its gradient, as autograd's formula writes them."""
    y, indices = aten.max_pool2d_with_indices(x, *STEM)
    return y, aten.max_pool2d_with_indices_backward(g, x, *STEM, [1, 1], False, indices)


@pytest.mark.parametrize("last", [False, True])
def test_a_pool_and_its_gradient(last: bool) -> None:
    x = images(last=last)
    trace = written(step, x, torch.randn_like(aten.max_pool2d_with_indices(x, *STEM)[0]))
    assert names(trace) == ["tessera.max_pool", "tessera.max_pool_backward"]
    offsets = trace.equations[0].outputs[1]
    assert offsets is not None and offsets.dtype is torch.int8 and x not in trace.equations[1].inputs()


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: F.max_pool1d(x, 3, padding=1), (2, 3, 9)),
        (lambda x: F.max_pool1d(x, 2), (3, 9)),
        (lambda x: F.max_pool2d(x, 2), (2, 3, 8, 8)),
        (lambda x: F.max_pool2d(x, (2, 3), 1, dilation=(1, 2), ceil_mode=True), (3, 8, 9)),
        (lambda x: F.max_pool3d(x, 2, 1, 1), (2, 3, 4, 5, 6)),
    ],
)
def test_a_pool_without_a_gradient(fn: Callable, shape: tuple[int, ...]) -> None:
    trace = written(fn, images(*shape))
    assert names(trace) == ["tessera.max_pool"] and trace.equations[0].outputs[1] is None


def test_sizes_may_be_symbolic() -> None:
    x = images()
    trace = written(step, x, torch.randn_like(aten.max_pool2d_with_indices(x, *STEM)[0]), dynamic=(0,))
    assert names(trace)[0] == "tessera.max_pool"


def other_windows(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, indices = aten.max_pool2d_with_indices(x, *STEM)
    return y, aten.max_pool2d_with_indices_backward(g, x, [4, 4], [2, 2], [1, 1], [1, 1], True, indices)


def test_indices_that_something_else_reads_stay() -> None:
    x = images(2, 3, 8, 8)
    for fn in (
        lambda x: F.max_pool2d(x, 2, return_indices=True),
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[1] + 1,
    ):
        trace = trace_of(fn, x)
        assert pool_offsets(trace, why_not) is trace
        assert "its indices are read by something else than its gradient" in reasons(trace, why_not).values()


def test_gradients_over_other_windows_stay() -> None:
    x = images(2, 3, 8, 8)
    trace = trace_of(other_windows, x, torch.randn(2, 3, 4, 4))
    assert pool_offsets(trace, why_not) is trace


def test_every_pool_that_stays_says_why() -> None:
    def why(fn: Callable, x: torch.Tensor) -> str:
        trace = trace_of(fn, x)
        assert pool_offsets(trace, why_not) is trace
        return " ".join(reasons(trace, why_not).values())

    assert "torch.int64" in why(lambda x: F.max_pool2d(x, 2), torch.arange(32).view(1, 2, 4, 4))
    assert "more than 127 elements" in why(lambda x: F.max_pool2d(x, 12), images(1, 1, 24, 24))
    assert "more than 49" in why(lambda x: F.max_pool2d(x, 8), images(1, 1, 24, 24))
    assert "no elements" in why(lambda x: F.max_pool2d(x, 2), images(0, 1, 24, 24))
