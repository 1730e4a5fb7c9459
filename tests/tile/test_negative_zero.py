"""Numbers at the edge: -0.0 alone sums to 0.0, as in eager; what is no number becomes some whole number."""

from __future__ import annotations

import pytest
import torch

import tessera


def sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = x.view(2, 1, 1).expand(2, 1, 3)
    return x.sum(1), x.mean(1), x.cumsum(1), (x * 1).sum(1, keepdim=True) * 1, wide.sum(2), wide.sum(1), x.sum((0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_of_negative_zero(dtype: torch.dtype) -> None:
    x = torch.full((2, 1), -0.0, dtype=dtype)
    for got, want in zip(tessera.jit(sums)(x), sums(x), strict=True):
        assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())
    whole = torch.arange(-1, 1).view(2, 1)
    torch.testing.assert_close(tessera.jit(sums)(whole.double()), sums(whole.double()))


def test_what_is_no_number_becomes_some_whole_number() -> None:
    """0 / 0 as an integer is any number; times zero it is zero, and what it is added to is still there."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        zeros = x.new_zeros(x.shape)
        scale = (zeros.amax() - zeros.amin()) / 255
        whole = (zeros / scale).round().clamp(0, 255).to(torch.uint8)
        return whole.to(torch.int32).float() * scale + x

    fast = tessera.jit(rounded)
    for seed in range(3):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(fast(x), x)
