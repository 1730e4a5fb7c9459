"""A sum begins at zero, also of one element: -0.0 alone gives 0.0, as in eager."""

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
