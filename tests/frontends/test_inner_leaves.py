"""Leaves that a program makes itself: what it writes of them to arguments has a history, as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tessera


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def copied(held: nn.Module, x: Tensor, y: Tensor) -> None:
    y.copy_(leaf(x).exp())


def scaled(held: nn.Module, x: Tensor, y: Tensor) -> None:
    y.mul_(leaf(x).exp())


def one_element(held: nn.Module, x: Tensor, y: Tensor) -> None:
    y[0] = leaf(x)[1] * 2


def added(held: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.add(x.detach(), 1, out=y)
    y += leaf(x)


def by_way_of_another(held: nn.Module, x: Tensor, y: Tensor) -> None:
    made = torch.zeros(2)
    made[:1] = leaf(x)[:1] * 2
    y.view(2, 1).squeeze(1).add_(made)


def to_a_buffer(held: nn.Module, x: Tensor, y: Tensor) -> None:
    held.b.copy_(leaf(x).exp())


def given_back(held: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return y.copy_(leaf(x).exp())


def gradient(held: nn.Module, x: Tensor, y: Tensor) -> None:
    v = leaf(x)
    y.copy_(torch.autograd.grad((v**3).sum(), v)[0])


def without_gradients(held: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        y.copy_(leaf(x).exp())


def detached(held: nn.Module, x: Tensor, y: Tensor) -> None:
    y.copy_(leaf(x).exp().detach())


def no_leaf(held: nn.Module, x: Tensor, y: Tensor) -> None:
    y.copy_(x.detach().requires_grad_(False) * 2)


KEEP = (copied, scaled, one_element, added, by_way_of_another, to_a_buffer, given_back)


@pytest.mark.parametrize("program", [*KEEP, gradient, without_gradients, detached, no_leaf])
@pytest.mark.parametrize("wanted", [False, True])
def test_histories_of_written_arguments(program: Callable, wanted: bool) -> None:
    seen = []
    for compiled in (False, True):
        held = nn.Module()
        held.register_buffer("b", torch.zeros(2))
        x, y = torch.ones(2, requires_grad=wanted), torch.ones(2)
        (tessera.jit(program) if compiled else program)(held, x, y)
        seen.append([(z.detach(), z.requires_grad, z.is_leaf) for z in (x, y, held.b)])
    torch.testing.assert_close(seen[1], seen[0])


@pytest.mark.parametrize("program", [without_gradients, detached, no_leaf])
def test_without_a_history_the_graph_is_compiled(program: Callable) -> None:
    tessera.jit(program, strict=True)(nn.Module(), torch.ones(2), torch.ones(2))


def result_written(x: Tensor) -> Tensor:
    y = x.detach() * 2
    y.sub_(leaf(x), alpha=2)
    return y


def view_written(x: Tensor) -> Tensor:
    y = torch.zeros(2, 2)
    y[0] = leaf(x).exp()
    return y


def view_of_what_was_written(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.zeros(4)
    y[:2].copy_(leaf(x).exp())
    return y[1:], y.detach()


def out_argument(x: Tensor) -> list[Tensor]:
    y = torch.empty(2)
    torch.mul(x.detach(), 2, out=y)
    y *= leaf(x)
    return [y, y + 1]


def with_an_argument(x: Tensor) -> Tensor:
    y = x * 2
    y.mul_(leaf(x))
    return y


def leaf_of_a_leaf(x: Tensor) -> Tensor:
    y = x.detach().clone()
    y.add_(leaf(leaf(x) * 2))
    return y.sin()


WRITTEN = [result_written, view_written, view_of_what_was_written, out_argument, with_an_argument, leaf_of_a_leaf]


@pytest.mark.parametrize("program", WRITTEN)
@pytest.mark.parametrize("wanted", [False, True])
def test_histories_of_written_results(program: Callable, wanted: bool) -> None:
    seen = []
    for fn in (program, tessera.jit(program)):
        x = torch.tensor([0.5, 2.0], requires_grad=wanted)
        given = fn(x)
        outs = given if isinstance(given, (tuple, list)) else (given,)
        sum((o.square().sum() for o in outs), torch.zeros(())).backward()
        seen.append((x.grad, [(o.detach(), o.requires_grad, o.is_leaf) for o in outs]))
    torch.testing.assert_close(seen[1], seen[0])


@pytest.mark.parametrize("p, training", [(0.3, False), (0.0, True)])
@pytest.mark.parametrize("grad", [False, True])
def test_dropout_that_gives_a_leaf_back(p: float, training: bool, grad: bool) -> None:
    """Under no_grad, too: it is the leaf itself."""

    def given(x: Tensor) -> Tensor:
        return nn.functional.dropout(leaf(x), p, training)

    with torch.set_grad_enabled(grad):
        x = torch.rand(3, 3, requires_grad=True)
        result = tessera.jit(given)(x)
        assert result.requires_grad and result.is_leaf
        assert torch.equal(result, given(x))
