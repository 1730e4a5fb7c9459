"""A tensor with a hook is still its memory: what is written to it, its other names and its views show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tessera


def _ten_times(grad: torch.Tensor) -> torch.Tensor:
    return grad * 10


def another_name(x: torch.Tensor) -> torch.Tensor:
    a = x * 2
    b = a.contiguous()
    b.register_hook(_ten_times)
    b.sub_(1)
    return a * 3


def a_view_made_before(x: torch.Tensor) -> torch.Tensor:
    a = x * 2
    view = a[0]
    a.register_hook(_ten_times)
    a[0].sub_(1)
    return view * a


def a_written_argument(x: torch.Tensor) -> torch.Tensor:
    name = x.contiguous()
    x.mul_(2)
    name.register_hook(_ten_times)
    name[-1].sub_(1)
    return x * 3


def as_in_eager(program: Callable) -> None:
    """The result, the argument afterwards and the gradient before it."""
    seen = []
    for call in (program, tessera.jit(program, executors=["aten"])):
        leaf = torch.arange(4.0).requires_grad_()
        x = leaf * 1
        out = call(x)
        out.sum().backward()
        seen.append((out.detach(), x.detach(), leaf.grad))
    torch.testing.assert_close(seen[0], seen[1])


@pytest.mark.parametrize("program", [another_name, a_view_made_before, a_written_argument])
def test_a_write_behind_a_hook(program: Callable) -> None:
    as_in_eager(program)


def test_a_hook_on_a_view_whose_memory_is_written() -> None:
    """Behind the graph, where TorchDynamo sets it, the view's history is out of date."""

    @tessera.jit
    def program(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(_ten_times)
        seen = x.detach()
        seen[0] = 2
        return seen

    view = torch.arange(4.0).requires_grad_()[1:]
    torch.testing.assert_close(program(view), torch.tensor([2.0, 2.0, 3.0]))


def hook_first(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(_ten_times)
    x.sin_()
    return x * 2


def write_first(x: torch.Tensor) -> torch.Tensor:
    x.sin_()
    x.register_hook(_ten_times)
    return x * 2


def between_writes(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x.mul_(2)
        x.register_hook(_ten_times)
        x.sin_()
    return x.sum()


def by_a_view(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(_ten_times)
    x[:2].exp_()
    return x * x


def without_history(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(_ten_times)
    x.detach().mul_(3)
    with torch.no_grad():
        x.add_(1)
    return x * x


@pytest.mark.parametrize("program", [hook_first, write_first, between_writes, by_a_view, without_history])
def test_a_hook_on_an_argument_that_is_written(program: Callable) -> None:
    """Dynamo would set it when all is written: on another history, which the results do not lead through."""
    as_in_eager(program)


def test_a_hook_on_an_argument_that_is_only_read_is_compiled() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(_ten_times)
        return (x * 2).sin_()

    x = torch.ones(3, requires_grad=True)
    tessera.jit(program, fullgraph=True)(x * 1).sum().backward()
    torch.testing.assert_close(x.grad, 20 * torch.full((3,), 2.0).cos())
