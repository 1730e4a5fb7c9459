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


@pytest.mark.parametrize("program", [another_name, a_view_made_before, a_written_argument])
def test_a_write_behind_a_hook(program: Callable) -> None:
    seen = []
    for call in (program, tessera.jit(program, executors=["aten"])):
        leaf = torch.arange(4.0).requires_grad_()
        x = leaf * 1
        out = call(x)
        out.sum().backward()
        seen.append((out.detach(), x.detach(), leaf.grad))
    torch.testing.assert_close(seen[0], seen[1])


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
