"""A `torch.autograd.Function` that is given one tensor twice, or marks a result, under TorchDynamo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import tessera
from tessera.util.errors import InputError


class Weighted(torch.autograd.Function):
    """Its gradients are not its derivative, so that each of them can be told."""

    @staticmethod
    def forward(ctx, x, y):  # noqa: ANN001, ANN205
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, ct):  # noqa: ANN001, ANN205
        x, y = ctx.saved_tensors
        return 2 * ct * y, 3 * ct * x


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):  # noqa: ANN001, ANN205
        sign = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(sign)
        return x * y, sign

    @staticmethod
    def backward(ctx, ct, _):  # noqa: ANN001, ANN205
        return ct, ct


class Pushed(Sign):
    """TorchDynamo ends the graph at a function with a rule for forward mode, and autograd calls its forward."""

    @staticmethod
    def jvp(ctx, x, y):  # noqa: ANN001, ANN205
        return x, None


def twice(x: torch.Tensor) -> torch.Tensor:
    return Weighted.apply(x, x)


def computed_twice(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return Weighted.apply(y, y) + Weighted.apply(x, y)


@pytest.mark.parametrize("fn", [twice, computed_twice])
def test_one_tensor_as_two_arguments(fn: Callable) -> None:
    x = torch.linspace(-1, 1, 4).requires_grad_()
    fast = tessera.jit(fn, fullgraph=True)
    torch.testing.assert_close(fast(x), fn(x))
    torch.testing.assert_close(torch.autograd.grad(fast(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))


@pytest.mark.parametrize("function", [Sign, Pushed])
def test_marked_results_require_no_gradient(function: type) -> None:
    x = torch.linspace(-1, 1, 4).requires_grad_()
    for fn in (lambda x: function.apply(x, x), lambda x: function.apply(x, x * 2)):
        out, sign = tessera.jit(fn)(x)
        assert out.requires_grad
        assert not sign.requires_grad


def test_a_marked_result_that_is_written_brings_no_gradient() -> None:
    """Nor does its function's backward run, which would read what the caller may have written by then."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = x[1:]
        _, sign = Sign.apply(part, part)  # type: ignore[misc]
        sign.copy_(sign * 2)
        return part, sign, x.detach() * 1

    for f in (program, tessera.jit(program), tessera.jit(program, frontend="functional")):
        x = torch.tensor([1.0, -2.0, 3.0]).requires_grad_() * 1
        part, sign, _ = f(x)
        with torch.no_grad():
            part.add_(1)
        assert not sign.requires_grad and torch.equal(sign, torch.tensor([0.0, 2.0]))
        (grad,) = torch.autograd.grad(part.sum(), x)
        assert torch.equal(grad, torch.tensor([0.0, 1.0, 1.0]))


def test_a_step_whose_loss_has_no_gradient_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tessera.train_step(model, lambda m, x: Pushed.apply(m(x), m(x))[1].sum(), optimizer)
    before = model.weight.detach().clone()
    with pytest.raises(InputError, match="depends on no parameter"):
        step(torch.ones(1, 2))
    assert torch.equal(model.weight, before)
