"""Capture by way of TorchDynamo: sizes that turn out to be fixed while a program is recorded."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tessera


def test_sizes_that_dynamo_found_to_be_fixed() -> None:
    """`take_along_dim` has no symbolic form: what was a symbol is one number, and later operators must see that."""
    torch._dynamo.reset()

    def f(x: torch.Tensor) -> torch.Tensor:
        best = x.argmax(-1, keepdim=True)
        return torch.addcmul(x, torch.take_along_dim(x, best, -1).sum(), torch.cummax(x, 0)[1])

    fast = tessera.jit(f, dynamic=True, strict=True)
    for n in (4, 7):
        x = torch.randn(n)
        torch.testing.assert_close(fast(x), f(x))


def test_sizes_that_an_operator_fixes_on_the_way() -> None:
    torch._dynamo.reset()

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.pad(torch.isfinite(x), (1, -1))

    fast = tessera.jit(f, dynamic=True, strict=True)
    for n in (5, 9):
        x = torch.randint(0, 5, (n, n)).t()
        assert torch.equal(fast(x), f(x))
