"""What a kernel computes again instead of reading it from another one, and what not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from programs import assert_same, trace_of

from tessera.executors.tile import COMPILER
from tessera.ir.trace import Trace
from tessera.passes.fuse.recompute import recompute
from tessera.passes.fuse.regions import fuse


def between(trace: Trace) -> list[torch.dtype]:
    """Dtypes of what kernels read of other kernels' results."""
    kernel = {trace.equations[i]: k for k, region in enumerate(fuse(trace, COMPILER)) for i in region}
    users = trace.users()
    return [
        v.dtype
        for eqn in kernel
        for v in eqn.results()
        if v.ndim > 1 and any(kernel.get(user, kernel[eqn]) != kernel[eqn] for user in users.get(v, ()))
    ]


def assert_read_in_16_bits(fn: Callable) -> tuple[Trace, Trace]:
    """Kernels hand 32 bits on to one another before, and none after."""
    x, w = torch.randn(512, 64).bfloat16(), torch.randn(64)
    before = trace_of(fn, x, w)
    after = recompute(before, COMPILER)
    assert_same(before, after, x, w)
    assert torch.float32 in between(before) and torch.float32 not in between(after)
    return before, after


def spread(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sums over rows, of what is computed with them afterwards too: two kernels."""
    centred = x.float() - w
    return (centred * torch.rsqrt((centred * centred).sum(0))).to(x.dtype)


def test_a_value_of_fewer_bytes_is_read_instead() -> None:
    assert_read_in_16_bits(spread)


def test_what_takes_as_many_bytes_is_written_once() -> None:
    x, w = torch.randn(512, 64), torch.randn(64)
    trace = trace_of(spread, x, w)
    assert recompute(trace, COMPILER) is trace


def test_a_result_is_written_but_not_read_again() -> None:
    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        centred = x.float() - w
        return centred, (centred * centred.sum(0)).to(x.dtype)

    before, after = assert_read_in_16_bits(both)
    assert after.outputs == before.outputs


def test_what_others_than_kernels_read_is_written_for_them_alone() -> None:
    def also_sorted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        centred = x.float() - w
        return (centred * centred.sort(0)[0][0]).to(x.dtype)

    assert_read_in_16_bits(also_sorted)


def test_a_kernel_has_one_copy_of_what_two_values_are_made_of() -> None:
    def steps(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        centred = x.float() - w
        positive = centred.relu()
        norm = (centred * positive).sum(1, keepdim=True)
        return (centred * norm).to(x.dtype), (centred * norm.sort(0)[0] + positive).to(x.dtype)

    x, w = torch.randn(512, 64).bfloat16(), torch.randn(64)
    before = trace_of(steps, x, w)
    after = recompute(before, COMPILER)
    assert_same(before, after, x, w)
    assert len(between(before)) == 2 and not between(after)
    assert sum(eqn.op._opname == "sub" for eqn in after.equations) == len(fuse(after, COMPILER)) == 2  # type: ignore[union-attr]
