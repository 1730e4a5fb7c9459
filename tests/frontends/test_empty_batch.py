"""A batch norm of nothing gives nothing and leaves its statistics as they were; a loss of nothing has gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera


def observed(compiled: Callable, shape: tuple[int, ...], training: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4).train(training)
    x = torch.randn(shape, requires_grad=True)
    y = compiled(norm)(x)
    y.sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in norm.parameters()), *norm.buffers()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(0, 4), (0, 3), (2, 4, 0)])  # eager does not look at the channels of nothing
def test_a_batch_norm_of_nothing(shape: tuple[int, ...], training: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Tessera could not")
        got = observed(tessera.jit, shape, training)
    torch.testing.assert_close(got, observed(lambda m: m, shape, training))


LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.kl_div)


@pytest.mark.filterwarnings("error:Tessera could not", "ignore:reduction. 'mean'")
@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_a_loss_of_nothing(loss: Callable, reduction: str, frontend: str) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(x[:, 4:], y[:, 4:], reduction=reduction) * 2

    def observed(f: Callable) -> list[torch.Tensor]:
        x, y = torch.ones(3, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
        out = f(x, y)
        return [out.detach(), *torch.autograd.grad(out, (x, y), torch.ones_like(out))]

    fast = tessera.jit(program, executors=["aten"], frontend=frontend)
    torch.testing.assert_close(observed(fast), observed(program), equal_nan=True)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_second_derivatives_of_a_loss_of_nothing(loss: Callable) -> None:
    x = torch.ones(3, 0)

    def second(t) -> torch.Tensor:  # noqa: ANN001
        return t.grad(lambda x: t.grad(lambda x: loss(x, x * 2))(x).sum())(x)

    assert second(tessera).shape == second(torch.func).shape == (3, 0)


@pytest.mark.parametrize("which", range(3))
def test_a_gradient_by_one_of_several_results_of_nothing(which: int) -> None:
    """It has no elements, but it is there."""
    x = torch.zeros(0, 0, requires_grad=True)
    for call in (torch.linalg.svd, tessera.jit(torch.linalg.svd, strict=True)):
        (grad,) = torch.autograd.grad(call(x)[which].sum(), x, allow_unused=True)
        assert grad is not None and grad.shape == x.shape


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize("name", ["dropout", "alpha_dropout", "feature_alpha_dropout", "feature_dropout"])
def test_dropout_of_nothing_gives_its_argument_back(name: str, frontend: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = (x * 2)[..., 3:]
        return part, getattr(torch, name)(part, 0.5, True)

    torch._dynamo.reset()
    for f in (program, tessera.jit(program, frontend=frontend)):
        part, out = f(torch.randn(2, 3))
        assert out.shape == (2, 0) and out.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
