"""Max pools in compiled programs on a CPU: results, gradients and strides as in eager, and what `explain` says."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, 1))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_stem_learns_as_in_eager(last: bool, dynamic: bool) -> None:
    layout = torch.channels_last if last else torch.contiguous_format
    eager = Stem().to(memory_format=layout)
    own = copy.deepcopy(eager)
    fast = tessera.jit(own, strict=True, dynamic=dynamic)
    for n, h, w in ((2, 19, 22), (3, 16, 31)) if dynamic else ((2, 19, 22),):
        x = torch.randn(n, 3, h, w).to(memory_format=layout)
        results = []
        for model, call in ((eager, eager), (own, fast)):
            model.zero_grad()
            y = call(x)
            y.square().sum().backward()
            results.append([y, *(p.grad for p in model.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
            assert a.stride() == b.stride()
    text = str(tessera.explain(fast))
    assert "tessera.max_pool " in text.replace(",", " ") and "tessera.max_pool_backward" in text


def test_a_pool_has_a_kernel_of_its_own_and_says_so() -> None:
    x = torch.randn(2, 3, 8, 8)
    fast = tessera.jit(lambda x: F.max_pool2d(x, 2))
    assert torch.equal(fast(x), F.max_pool2d(x, 2))
    assert "tile fused: tessera.max_pool" in str(tessera.explain(fast))


def test_indices_are_pytorchs_where_they_are_asked_for() -> None:
    x = torch.randn(2, 3, 8, 8)
    fast = tessera.jit(lambda x: F.max_pool2d(x, 2, return_indices=True))
    for a, b in zip(fast(x), F.max_pool2d(x, 2, return_indices=True), strict=True):
        assert torch.equal(a, b)
    assert "its indices are read by something else than its gradient" in str(tessera.explain(fast))


def test_pools_are_differentiated_twice() -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x.sin(), 2).square().sum()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        return tessera.grad(f)(x).square().sum()

    y = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(y), y, create_graph=True)
    (wanted,) = torch.autograd.grad(g.square().sum(), y)
    torch.testing.assert_close(tessera.jit(tessera.grad(penalty))(x), wanted)


def test_nothing_to_pool_and_numbers_that_do_not_float() -> None:
    fast = tessera.jit(lambda x: F.max_pool2d(x, 2))
    assert fast(torch.randn(0, 3, 8, 8)).shape == (0, 3, 4, 4)
    whole = torch.arange(32).view(1, 2, 4, 4)
    assert torch.equal(fast(whole), F.max_pool2d(whole, 2))
