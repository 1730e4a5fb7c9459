"""Whole powers may be differentiated until zeros come out, as in eager: constant gradients depend on x still."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tessera

X = torch.tensor([1.5, 2.0], dtype=torch.float64)

POWERS: dict[str, Callable[[Tensor], Tensor]] = {
    "0": lambda x: x**0,
    "1": lambda x: x**1,
    "2": lambda x: x**2,
    "2.0": lambda x: x**2.0,
    "3": lambda x: x**3,
    "square": lambda x: x.square(),
    "float_power": lambda x: x.float().float_power(2),
    "in place": lambda x: (x * 2).pow_(1),
    "of a view": lambda x: x.view(2, 1) ** 2,
    "of powers": lambda x: (x**1) ** 2,
    "polynomial": lambda x: (x**2 + x**1) * 3,
    "product": lambda x: x * x,
}


def derivatives(f: Callable, x: Tensor, order: int = 4) -> list[tuple[Tensor, bool]]:
    """Gradients of gradients, for as long as they require one."""
    found, y = [], f(x)
    while len(found) < order and y.requires_grad:
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append((y.detach(), y.requires_grad))
    return found


@pytest.mark.parametrize("name", POWERS)
@pytest.mark.parametrize("executors", [None, ["aten"]])
@pytest.mark.parametrize("leaf", [True, False])
def test_derivatives_end_where_eagers_do(name: str, executors: list[str] | None, leaf: bool) -> None:
    x = X.clone().requires_grad_()
    x = x if leaf else x * 1
    fast = tessera.jit(POWERS[name], executors=executors, strict=True)
    torch.testing.assert_close(derivatives(fast, x), derivatives(POWERS[name], x))


@pytest.mark.parametrize("name", POWERS)
def test_transforms(name: str) -> None:
    def third(t: object) -> Tensor:
        """By every mix of modes, over a batch."""

        def along(x: Tensor) -> Tensor:
            return t.jvp(t.grad(lambda x: POWERS[name](x).sum().double()), (x,), (torch.ones_like(x),))[1].sum()  # type: ignore[attr-defined]

        return t.vmap(t.jacrev(along))(torch.stack([X, -X]))  # type: ignore[attr-defined]

    torch.testing.assert_close(third(tessera), third(torch.func))


def test_nothing_is_left_of_it_in_programs() -> None:
    def second(x: Tensor) -> Tensor:
        return tessera.hessian(lambda x: (x**2 + x**1).sum())(x)

    fast = tessera.jit(second, frontend="functional")
    torch.testing.assert_close(fast(X), second(X))
    assert "tessera.tied" not in str(tessera.stages(fast)[-1])

    def first(x: Tensor) -> Tensor:
        return (x * 2) ** 1

    fast = tessera.jit(first)
    fast(X.clone().requires_grad_()).sum().backward()
    assert "tessera.tied" not in str(tessera.stages(fast)[-1])
