"""Capture by way of TorchDynamo: sizes that turn out to be fixed while a program is recorded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tessera


def _pad(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (1, -1)) + F.pad(y, (2, -2))


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


def test_operators_that_broadcast_symbolic_sizes() -> None:
    """PyTorch's rules for these call `expand`, which must find symbols and not numbers."""
    for f in (
        lambda x, y: torch.lerp(x, y, 0.3),
        lambda x, y: torch.addcmul(x, y, y),
        lambda x, y: x.addcdiv(x, y),
        _pad,
    ):
        torch._dynamo.reset()
        fast = tessera.jit(f, dynamic=True, strict=True)
        for n in (4, 7):
            x, y = torch.randn(n, 5), torch.rand(5) + 1
            with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
                torch.testing.assert_close(fast(x, y), f(x, y))


def test_sizes_that_an_operator_fixes_on_the_way() -> None:
    torch._dynamo.reset()

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.pad(torch.isfinite(x), (1, -1))

    fast = tessera.jit(f, dynamic=True, strict=True)
    for n in (5, 9):
        x = torch.randint(0, 5, (n, n)).t()
        assert torch.equal(fast(x), f(x))


@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels_last"])
def test_gradients_whose_operators_know_no_symbolic_sizes(last: bool) -> None:
    """PyTorch has no rule for the types of these backward operators where sizes are symbols."""
    torch._dynamo.reset()

    def f(x: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(F.softshrink(x, 0.3), scale_factor=2, mode="bilinear")
        z = F.interpolate(F.hardshrink(x, 0.2).flatten(2), scale_factor=2, mode="linear")
        return y.square().sum() + z.sin().sum() + F.interpolate(x.flatten(2), scale_factor=3).exp().sum()

    fast = tessera.jit(f, dynamic=True, strict=True)
    for n in (4, 7):
        x = torch.randn(2, 3, n, n + 1).to(memory_format=torch.channels_last if last else torch.contiguous_format)
        x.requires_grad_()
        got, want = (torch.autograd.grad(g(x), x)[0] for g in (fast, f))
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def test_gradients_of_sizes_that_are_rounded() -> None:
    torch._dynamo.reset()

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x.exp(), scale_factor=1.5).sin()

    fast = tessera.jit(f, dynamic=True, strict=True)
    nested = tessera.jit(lambda x: tessera.grad(lambda y: f(y).sum())(x), dynamic=True, strict=True)
    for n in (4, 7):
        x = torch.randn(2, 3, n, requires_grad=True)
        got, want = (torch.autograd.grad(g(x).sum(), x)[0] for g in (fast, f))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(nested(x.detach()), want)


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_results_that_are_views_by_symbolic_sizes(grad: bool) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n, m = x.shape
        y = x * 2
        return x[n // 2 :], x.reshape(m, -1), x[1:].unflatten(0, (n - 1, 1)), y, y[n // 2 :]

    torch._dynamo.reset()
    fast = tessera.jit(f, dynamic=True, strict=True)
    for n in (6, 9, 4):
        x = torch.randn(n, 3, requires_grad=grad)
        got, want = fast(x), f(x)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w)
        assert got[0].data_ptr() == want[0].data_ptr() and got[1].data_ptr() == x.data_ptr()
        if grad:
            one, two = (torch.autograd.grad(sum(t.sin().sum() for t in out), x)[0] for out in (got, want))
            torch.testing.assert_close(one, two)


def test_parts_without_elements_under_symbolic_sizes() -> None:
    """`n - 4` is a size like any other, and none where n is 4."""
    for f in (
        lambda x: (x[:, 4:] * 2).sum(1) + x[:, 0],
        lambda x: (x[:, 4:] * 2).softmax(1).sum(1) + x[:, 0],
    ):
        torch._dynamo.reset()
        fast = tessera.jit(f, dynamic=True, strict=True)
        for n in (8, 4):
            x = torch.randn(5, n, requires_grad=True)
            got, want = (torch.autograd.grad(g(x).sum(), x)[0] for g in (fast, f))
            torch.testing.assert_close(fast(x), f(x))
            torch.testing.assert_close(got, want)


def test_operators_stay_whole_under_symbolic_sizes() -> None:
    """PyTorch takes this loss apart where it is asked in Python, and then -1 among the labels counts for a class."""
    torch._dynamo.reset()
    x, labels = torch.randn(2, 5, requires_grad=True), torch.tensor([[1, 2, -1, 0, 0], [3, -1, 0, 0, 0]])
    got = tessera.jit(F.multilabel_margin_loss, dynamic=True, strict=True)(x, labels)
    want = F.multilabel_margin_loss(x, labels)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x))
