"""Losses of sequences whose lengths are tensors or numbers, and their gradients, as PyTorch has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tessera
from tessera.util.errors import DerivativeError

ROWS, ONE = torch.tensor([[1, 2, 3], [2, 2, 1]]), torch.tensor([1, 2])
BEHIND = torch.tensor([1, 2, 3, 2, 2])  # one after the other
LENGTHS = torch.tensor([5, 2]), torch.tensor([3, 2])  # the second is too short: two equal labels want three places
CASES = {
    "rows": ((5, 2, 4), ROWS, LENGTHS), "behind": ((5, 2, 4), BEHIND, LENGTHS),
    "numbers": ((5, 2, 4), ROWS, ([5, 4], [3, 0])), "one": ((5, 4), ONE, (torch.tensor(5), torch.tensor(2))),
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", CASES)
def test_as_pytorch(name: str, reduction: str) -> None:
    size, targets, lengths = CASES[name]
    x = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(-1), targets, *lengths, reduction=reduction, zero_infinity=True)

    torch.testing.assert_close(tessera.vmap(loss)(torch.stack([x, x]))[1], loss(x))
    own = x.clone().requires_grad_()
    want = loss(own)
    weights = torch.rand_like(want)
    value, pull = tessera.vjp(loss, x)
    torch.testing.assert_close(value, want.detach())
    torch.testing.assert_close(pull(weights)[0], torch.autograd.grad(want, own, weights)[0])


def test_a_derivative_of_its_gradient_is_nobodys() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(-1), ROWS, *LENGTHS, zero_infinity=True)

    grad = tessera.grad(lambda x: tessera.grad(loss)(x).square().sum())
    with pytest.raises(DerivativeError, match="gradient of ctc_loss"):
        grad(torch.randn(5, 2, 4))
