"""What a kernel computes again instead of reading it from another one, and what not."""

from __future__ import annotations

import torch
from programs import assert_same, trace_of

from tessera.executors.tile import COMPILER
from tessera.ir.trace import Trace
from tessera.passes.compute_again import compute_again
from tessera.passes.fuse import fuse


def written(trace: Trace) -> list[torch.dtype]:
    """Dtypes of what kernels write for others."""
    regions = [{trace.equations[i] for i in region} for region in fuse(trace, COMPILER)]
    users = trace.users()
    return [
        v.dtype
        for region in regions
        for eqn in region
        for v in eqn.results()
        if v.ndim > 1 and any(user not in region for user in users.get(v, ()))
    ]


def spread(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sums over rows, of what is computed with them afterwards too: two kernels."""
    centred = x.float() - w
    return (centred * torch.rsqrt((centred * centred).sum(0))).to(x.dtype)


def test_a_value_of_fewer_bytes_is_read_instead() -> None:
    x, w = torch.randn(512, 64).bfloat16(), torch.randn(64)
    before = trace_of(spread, x, w)
    after = compute_again(before, COMPILER)
    assert_same(before, after, x, w)
    assert torch.float32 in written(before) and torch.float32 not in written(after)


def test_what_takes_as_many_bytes_is_written_once() -> None:
    x, w = torch.randn(512, 64), torch.randn(64)
    trace = trace_of(spread, x, w)
    assert compute_again(trace, COMPILER) is trace


def test_a_result_is_written_whoever_reads_it() -> None:
    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        centred = x.float() - w
        return centred, (centred * torch.rsqrt((centred * centred).sum(0))).to(x.dtype)

    x, w = torch.randn(512, 64).bfloat16(), torch.randn(64)
    before = trace_of(both, x, w)
    after = compute_again(before, COMPILER)
    assert_same(before, after, x, w)
    assert after.outputs == before.outputs
