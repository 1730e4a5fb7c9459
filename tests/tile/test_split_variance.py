"""Variances shared by many programs: each part reads its data once, and nothing is lost to a large mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from programs import trace_of

from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.interp import run
from tessera.tile.dialect.ops import KernelOp, LoadOp
from tessera.tile.from_trace.region import Lowered, lower
from tessera.tile.rewrites.split_reduction import can_split, split_reduction
from tessera.tile.schedules.schedule import plan
from tessera.tile.targets import named


def lowered(fn: Callable, *args: torch.Tensor, dynamic: tuple = ()) -> Lowered:
    return lower(trace_of(fn, *args, dynamic=dynamic), "spread")


def in_parts(kernel: KernelOp, parts: int, tensors: list[torch.Tensor], symbols: tuple[int, ...] = ()) -> None:
    halves = split_reduction(kernel, parts)
    values = dict(zip([s.data for s in kernel.symbol_names], symbols, strict=True))
    scratch = [
        torch.full((s.size.evaluate(values.__getitem__, int),), float("nan"), dtype=torch_dtype(s.element))
        for s in halves.scratch
    ]
    run(halves.first, [*tensors, *scratch], symbols)
    run(halves.second, [*tensors, *scratch], symbols)


def spread(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    variance, mean = torch.var_mean(x.float() * 2, [0], correction=0)
    return mean, (variance + 1e-5).rsqrt(), variance * 3


@pytest.mark.parametrize("parts", [1, 2, 7, 64, 200])  # even, with a rest, with parts that are empty
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_columns_in_parts(parts: int, mean: float) -> None:
    x = torch.randn(128, 6) + mean
    made = lowered(spread, x)
    assert can_split(made.kernel) and sum(s.axis is not None for s in plan(made.kernel)) == 2
    results = [torch.empty(v.shape) for v in made.stored]
    in_parts(made.kernel, parts, [x, *results])
    variance, middle = torch.var_mean(x.double() * 2, [0], correction=0)
    for got, right in zip(results, (middle, (variance + 1e-5).rsqrt(), variance * 3), strict=True):
        torch.testing.assert_close(got, right.float(), rtol=5e-6, atol=1e-6)


def test_the_data_is_read_once() -> None:
    halves = split_reduction(lowered(spread, torch.randn(128, 6)).kernel, 8)
    assert sum(step.axis is not None for step in plan(halves.first)) == 1
    along = [op for op in halves.first.block.ops if isinstance(op, LoadOp) and "r" in op.at.expr.names()]
    assert len(along) == 1


def test_an_outlier_in_the_first_place() -> None:
    x = torch.randn(4096, 3)
    x[0] = 1e4
    made = lowered(spread, x)
    results = [torch.empty(v.shape) for v in made.stored]
    in_parts(made.kernel, 64, [x, *results])
    torch.testing.assert_close(results[2] / 12, x.double().var(0, correction=0).float(), rtol=1e-5, atol=0)


def test_symbolic_sizes() -> None:
    x = torch.randn(128, 6) + 100
    made = lowered(spread, x, dynamic=(0,))
    for rows in (128, 97, 5):
        y = torch.randn(rows, 6) + 100
        results = [torch.empty(6) for _ in made.stored]
        in_parts(made.kernel, 16, [y, *results], (rows,))
        torch.testing.assert_close(results[2] / 12, y.double().var(0, correction=0).float(), rtol=1e-5, atol=0)


def test_what_is_written_along_the_axis_then() -> None:
    x = torch.randn(96, 6) + 50
    made = lowered(lambda x: (x - x.mean(0)) * (x.var(0, correction=0) + 1e-5).rsqrt(), x)
    result = torch.empty_like(x)
    in_parts(made.kernel, 5, [x, result])
    wide = x.double()
    want = (wide - wide.mean(0)) * (wide.var(0, correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(result, want.float(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: ((x - x.mean(0)).abs() ** 3).sum(0),  # no sum of squares
        lambda x: (x - (x - x.mean(0)).square().sum(0)).square().sum(0),  # three levels
    ],
)
def test_what_cannot_be_shared(fn: Callable) -> None:
    assert not can_split(lowered(fn, torch.randn(128, 6)).kernel)


def test_columns_of_a_batch_are_shared_out_on_a_gpu() -> None:
    triton = named("triton")
    if triton is None:
        pytest.skip("needs Triton")
    kernel = lowered(spread, torch.zeros(200704, 64)).kernel
    assert triton.propose(kernel, {})[0].split >= 128


def test_equal_numbers_deviate_by_nothing() -> None:
    """Whatever rounding does to their mean: the derivative of a root divides by the root."""
    x = torch.full((131, 3), 0.1) * torch.tensor([1.0, 7.0, float("inf")])
    x[5, 1] = float("nan")
    made = lowered(lambda x: torch.std(x * 3, [0]), x)
    whole = torch.empty(3)
    run(made.kernel, [x, whole])
    halves = torch.empty(3)
    in_parts(made.kernel, 16, [x, halves])
    for got in (whole, halves):
        torch.testing.assert_close(got, torch.std(x * 3, [0]), rtol=0, atol=0, equal_nan=True)
