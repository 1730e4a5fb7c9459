"""Tensors written in a traced function itself: memory like any other, whose number is known until a write hides it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tessera
from tessera.frontends.functional.trace import trace_function
from tessera.util.errors import CaptureError


def ways(f: Callable) -> list[Callable]:
    """What traces a function over a vector of numbers."""
    return [
        tessera.jit(f, frontend="functional"),
        tessera.jit(f),
        tessera.vmap(f),
        lambda x: tessera.jvp(f, (x,), (torch.ones_like(x),))[0],
    ]


def same(f: Callable) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    want = torch.stack([f(row) for row in x])
    for way in ways(f):
        torch.testing.assert_close(way(x.clone()), want)
    torch.testing.assert_close(tessera.grad(lambda x: f(x).sum())(x), torch.func.grad(lambda x: f(x).sum())(x))


THROUGH = {
    "itself": lambda v: v,
    "detach": lambda v: v.detach(),
    "view": lambda v: v.view(1),
    "index": lambda v: v[None],
    "select of view": lambda v: v.view(1)[0],
    "as_strided": lambda v: v.as_strided((1,), (1,)),
    "expand": lambda v: v.expand(1, 1),
}


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH)
def test_a_write_through_a_view_reaches_the_literal(through: Callable) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        v = torch.tensor(0.5)
        through(v).add_(3)
        return v + x

    same(f)


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH)
def test_a_number_is_what_the_literal_holds_now(through: Callable) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        v = torch.tensor(0.5)
        shown = through(v)
        before = v.item()
        v.mul_(4)
        shown.add_(1)
        return x * before + v.item() * shown.item()

    same(f)


def test_a_view_sees_a_write_to_the_literal() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        v = torch.tensor([0.5])
        shown = v.view(1, 1)
        v.copy_(torch.tensor([2.0]))
        torch.add(v, 1, out=v)
        v[0] = v[0] * 2
        return (shown + x).reshape(x.shape)

    same(f)


def test_a_literal_that_changes_its_shape() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        v = torch.tensor([2])
        v.squeeze_()
        v.unsqueeze_(0).add_(1)
        return x * v[0].item() + v.squeeze()

    same(f)


def test_a_literal_is_an_index() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.stack([x, x * 2, x * 3])
        i = torch.tensor(0)
        y[i] = 7.0
        i.add_(1)
        y[i + 1] = -1.0
        return y[i] + y[torch.tensor(0)] + y.select(0, i.item())

    same(f)


def test_arithmetic_of_literals_is_known() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        n = torch.tensor(3) * 2 + torch.tensor(1)
        return x * n.item() if bool(n > 6) else x

    same(f)


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH)
def test_what_a_run_writes_is_no_number_any_more(through: Callable) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        v = torch.tensor(0.5)
        shown = through(v)
        shown.add_(x.sum())
        return x * v.item()

    with pytest.raises(CaptureError, match="asks for the value"):
        trace_function(f, (torch.ones(3),))


def test_a_literal_is_new_at_every_call() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(0.5).add_(1) + x

    for fast in (tessera.jit(f, frontend="functional"), tessera.jit(f)):
        for _ in range(2):
            torch.testing.assert_close(fast(torch.zeros(2)), torch.full((2,), 1.5))
