"""Inside a transform that differentiates backward, tensors say that they require gradients, as torch.func's do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tessera


def flags(log: list) -> Callable:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = x * 2, y * 2
        with torch.no_grad():
            c = x * 3
        log.append([t.requires_grad for t in (x, y, a, b, a + b, c, a.detach(), a > 0)])
        return (a * b * c if a.requires_grad else a + b).sum()

    return f


WAYS = {
    "grad of one": lambda T, f, x, y: T.grad(f)(x, y),
    "grad of both": lambda T, f, x, y: T.grad(f, argnums=(0, 1))(x, y),
    "grad of the other": lambda T, f, x, y: T.grad(f, argnums=1)(x, y),
    "vjp": lambda T, f, x, y: T.vjp(f, x, y)[1](torch.ones(())),
    "jvp": lambda T, f, x, y: T.jvp(f, (x, y), (x, y)),
    "vmap": lambda T, f, x, y: T.vmap(f)(x, y),
    "vmap of grad": lambda T, f, x, y: T.vmap(T.grad(f))(x, y),
    "grad of grad": lambda T, f, x, y: T.grad(lambda x: T.grad(f)(x, y).sum())(x),
    "jacrev": lambda T, f, x, y: T.jacrev(f)(x, y),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_flags_are_those_of_torch_func(way: Callable) -> None:
    x, y = torch.arange(1.0, 4.0), torch.arange(2.0, 5.0)
    wanted: list = []
    got: list = []
    want = way(torch.func, flags(wanted), x, y)
    torch.testing.assert_close(way(tessera, flags(got), x, y), want)
    assert got[0] == wanted[0]
    assert "requires_grad" not in vars(torch.Tensor)
