"""reuse: kernels write over dead values of the program's own, and over nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from programs import copies, on_cuda, trace_of

import tessera
from tessera.executors import tile
from tessera.executors.claim import claim
from tessera.ir.interp import run
from tessera.ir.trace import Trace
from tessera.passes.memory.reuse import reuse
from tessera.tile.targets import missing
from tessera.util.config import override

pytestmark = pytest.mark.skipif(bool(missing("cpu")), reason=missing("cpu"))

X, W = torch.randn(40, 32), torch.randn(32, 32)


def final(fn: Callable, *args: torch.Tensor) -> Trace:
    """The program with kernels, checked: the same results, and its inputs as they were."""
    trace = trace_of(fn, *args)
    after = reuse(claim(tile.decompose(trace), ["tile", "aten"])[0])
    given = copies(args)
    for want, got in zip(run(trace, *copies(args)), run(after, *given), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for before, now in zip(args, given, strict=True):
        assert torch.equal(before, now)
    return after


def written(trace: Trace) -> int:
    return sum(eqn.op.name.endswith("_") for eqn in trace.equations if getattr(eqn.op, "namespace", "") == "tile")


def test_a_kernel_writes_over_a_dead_product():
    after = final(lambda x, w: (x @ w).sigmoid() * 2 + 1, X, W)
    assert written(after) == 1 and after.outputs[0] is after.equations[0].out


def test_through_a_view_of_it():
    assert written(final(lambda x, w: ((x @ w).view(4, 10, 32).sigmoid() + 1) @ w, X, W)) == 1


def test_two_results_take_two_arguments():
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple:
        a, b = x @ w, x @ w.t()
        return (a * b).sigmoid(), (a - b).sin()

    after = final(f, X, W)
    assert written(after) == 1 and not after.equations[-1].outputs


def test_what_is_still_read_stays():
    def read_later(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return (h.sigmoid() * 2 + 1) @ h.t()

    def given_back(x: torch.Tensor, w: torch.Tensor) -> tuple:
        h = x @ w
        return h, h.sigmoid() * 2 + 1

    def shown(x: torch.Tensor, w: torch.Tensor) -> tuple:
        h = x @ w
        return h[1:3], h.sigmoid() * 2 + 1

    for fn in (read_later, given_back, shown, lambda x, w: x.sigmoid() * 2 + 1 + w[0]):
        assert written(final(fn, X, W)) == 0


def test_memory_passes_from_kernel_to_kernel():
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        for _ in range(3):
            h = F.softmax(h.exp() * 0.1 + 1, 0).sin() + 2  # the sums are over the rows: kernels in a row
        return h

    final(f, X, W)


def test_a_value_is_not_scattered_into_itself():
    where = torch.arange(40)
    final(lambda x, w: (y := x @ w).index_add(0, where, y), X, W)
    final(lambda x, w: (y := x @ w).scatter(1, where[:32].flip(0).expand(40, 32), y), X, W)


def test_results_take_no_larger_memory() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        small, whole = (x * 2)[2:], x * 3
        return small.tanh(), small.exp() + 1, whole.tanh()

    for frontend in ("dynamo", "functional"):
        out = tessera.jit(program, executors=["aten"], frontend=frontend)(torch.ones(3))
        assert [y.untyped_storage().nbytes() for y in out] == [4, 4, 12]
        assert all(y.storage_offset() == 0 for y in out)


def test_on_a_gpu_too() -> None:
    """What a library gave and what a kernel makes of it are not held at once."""
    pytest.importorskip("triton")
    with override(machine="h200"):
        trace, _ = claim(on_cuda(lambda x: x.sort().values.exp() * 2, (256, 256)), ["tile", "aten"])
        assert written(reuse(trace)) == 1
