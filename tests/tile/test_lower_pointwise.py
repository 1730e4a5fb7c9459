"""Pointwise operators at their edges: numbers beside half precision, numbers to the left, what PyTorch raises for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tessera
from tessera.tile.targets import missing

pytestmark = pytest.mark.skipif(bool(missing("cpu")), reason=missing("cpu"))


def compiled(fn: Callable) -> Callable:
    return tessera.jit(fn, executors=["tile", "aten"], frontend="functional", strict=True)


def check_same_bits(fn: Callable[..., tuple[Tensor, ...]], *args: Tensor) -> None:
    fast = compiled(fn)
    for got, want in zip(fast(*args), fn(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert "tile fused" in str(tessera.explain(fast))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_rounded_where_a_step_hangs_on_them(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.2, 0.3, -0.1, 0.7, 1 / 3], dtype=dtype)
    check_same_bits(lambda x: (x == 0.1, x != 0.2, x <= 0.3, x < 0.7, x > 0.1), x)
    check_same_bits(lambda x: (x == torch.full_like(x, 0.1), x.masked_fill(x > 0.5, 0.1) == 0.1), x)
    check_same_bits(lambda x: (torch.where(x > 0, 0.1, x) == x, x.clamp(0.1, 0.3) == x), x)
    check_same_bits(lambda x: (torch.remainder(x, 0.1) + 0, torch.fmod(x, 0.1) + 0), x)
    check_same_bits(lambda x: (F.hardshrink(x, 0.1), F.hardtanh(x, -0.1, 0.3) == x), x)


def test_a_number_to_the_left() -> None:
    x = torch.tensor([0.5, -1.5, 3.0, 7.0])
    check_same_bits(lambda x: (-2 // x + 1, 2 % x, 3 - x, 2 / x, x.new_full((4,), 2) - x), x)
    check_same_bits(lambda x: (5 // x.to(torch.bfloat16), 0.25 // x.double()), x)


def test_a_truth_value_filled_with_a_number() -> None:
    check_same_bits(
        lambda x: (torch.full_like(x > 0, 3) & (x > 0), (x > 1) | torch.full_like(x > 0, 0)), torch.randn(5)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_hypot_of_large_and_small_numbers(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    few = [0.0, 3.0, -4.0, info.max, info.max / 2, info.tiny, -info.tiny / 8, math.inf, -math.inf, math.nan]
    x = torch.tensor(few, dtype=dtype)
    fast = compiled(lambda a, b: torch.hypot(a, b) * 1)
    got, want = fast(x[:, None], x), torch.hypot(x[:, None], x)
    torch.testing.assert_close(got, want, rtol=2 * info.eps, atol=0, equal_nan=True)


def test_integers_divided_by_zero_raise_as_in_pytorch() -> None:
    def divide(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a // b + 1, a % b * 2, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")

    fast, a = compiled(divide), torch.arange(-4, 4)
    b = torch.tensor([1, -1, 2, -2, 3, -3, 7, 5])
    for got, want in zip(fast(a, b), divide(a, b), strict=True):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fast(a, b - 1)
    assert "division of integers by zero" in str(tessera.explain(fast))
    check_same_bits(lambda a: (a // 3 + 1, a % -3 * 2, torch.fmod(a, 5) - 1), a)  # a number is known not to be zero


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_extreme_finds_its_element_again(dtype: torch.dtype) -> None:
    """Backward compares what it computes again with the extreme that forward stored, rounded."""
    x = torch.randn(33, 5, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    for fn in (lambda x: x.atan().amin(1), lambda x: x.sin().amax(0), lambda x: x.exp().max()):
        got, want = (torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled(fn), fn))
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
