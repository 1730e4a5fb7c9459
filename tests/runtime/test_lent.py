"""Inputs without a gradient that only second derivatives read: they are found as long as their owners keep them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tessera
from tessera.util.errors import DoubleBackwardError


def made() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 2, dtype=torch.float64).requires_grad_(), torch.randn(3, 2, dtype=torch.float64)


def distance(x: Tensor, w: Tensor) -> Tensor:
    return (x - w).norm(dim=1)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "distance": distance,
    "pairwise_distance": F.pairwise_distance,
    "copysign": lambda x, w: torch.copysign(x * x, w),
    "distance of sines": lambda x, w: distance(x.sin(), w.cos()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("executors", [None, ["aten"]])
def test_derivatives_of_every_order(name: str, executors: list[str] | None) -> None:
    def derivatives(f: Callable) -> list[Tensor]:
        x, w = made()
        y, found = f(x, w), []
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            found.append(y.detach() * 1)
        return found

    fast = tessera.jit(FUNCTIONS[name], executors=executors, strict=True)
    torch.testing.assert_close(derivatives(fast), derivatives(FUNCTIONS[name]))


def test_weights_that_are_no_leaves() -> None:
    """Steps of an inner loop: each loss is a function of what the step before made of the weights."""

    def adapted(loss: Callable) -> list[Tensor]:
        torch.manual_seed(0)
        x, *leaves = (torch.randn(*sizes) for sizes in ((3, 4), (5, 4), (5,), (2, 5), (2,)))
        weights = leaves = [leaf.requires_grad_() for leaf in leaves]
        for _ in range(3):
            grads = torch.autograd.grad(loss(x, *weights), weights, create_graph=True)
            weights = [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]
        return list(torch.autograd.grad(loss(x, *weights), leaves))

    def loss(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return F.linear(F.linear(x, w, b).tanh(), v, c).square().mean()

    torch.testing.assert_close(adapted(tessera.jit(loss, strict=True)), adapted(loss))


def test_they_are_not_kept_in_memory() -> None:
    x, w = made()
    y = tessera.jit(distance, executors=["aten"])(x, w)
    gone = weakref.ref(w)
    del w
    assert gone() is None
    with pytest.raises(DoubleBackwardError, match="contents of the input 'w'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("change", [lambda w: w.add_(1), lambda w: setattr(w, "data", w + 1)])
def test_what_was_written_since_is_not_read(change: Callable) -> None:
    x, w = made()
    y = tessera.jit(distance, executors=["aten"])(x, w)
    change(w)
    with pytest.raises(DoubleBackwardError, match="contents of the input 'w'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_what_the_program_writes_is_not_lent() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = distance(x, w)
        w.mul_(2)
        return y

    x, w = made()
    y = tessera.jit(f, executors=["aten"])(x, w)
    try:
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    except DoubleBackwardError:
        return
    torch.testing.assert_close(g, torch.autograd.grad(distance(x, made()[1]).sum(), x)[0])


@pytest.mark.parametrize("leaf", [False, True])
def test_an_argument_of_which_only_the_shape_counts(leaf: bool) -> None:
    """It requires a gradient and gets none."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(torch.ones_like(w), x).erf(), w

    def second(f: Callable) -> tuple[Tensor, ...]:
        x, w = made()
        w = w.requires_grad_() if leaf else w.requires_grad_() * 1
        y, _ = f(x, w)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return g, *torch.autograd.grad(g.square().sum(), (x, w), allow_unused=True)

    ours, eager = second(tessera.jit(f, executors=["aten"], strict=True)), second(f)
    assert ours[2] is None and eager[2] is None
    torch.testing.assert_close(ours[:2], eager[:2])
