"""Functional tracing: a function may write tensors that it closes over, a module its parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tessera


class Counts(torch.nn.Module):
    """A buffer that is written and read, and given back."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count.add_(x.detach())
        return x * self.count, self.count, self.count[1:]


class Clips(torch.nn.Module):
    """A parameter that is written behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 1.5, -2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return (x * self.weight).sin()


def _norm() -> torch.nn.Module:
    return torch.nn.BatchNorm1d(3)


def _run(make: Callable, call: Callable) -> list[object]:
    model = make()
    fast, seen = call(model), []
    for scale in (1.0, 2.0):
        x = (torch.arange(6.0).reshape(2, 3) if make is _norm else torch.arange(3.0)) * scale
        x.requires_grad_()
        outs = fast(x)
        outs = outs if isinstance(outs, tuple) else (outs,)
        outs[0].square().sum().backward()
        seen += [[o.detach().clone() for o in outs], x.grad, [t.detach().clone() for t in model.state_dict().values()]]
        seen.append([p.grad for p in model.parameters()])
        model.zero_grad()
    return seen


@pytest.mark.parametrize("make", [Counts, Clips, _norm])
@pytest.mark.parametrize("executors", [["aten"], None])
def test_written_state(make: Callable, executors: list[str] | None) -> None:
    want = _run(make, lambda model: model)
    got = _run(make, lambda model: tessera.jit(model, executors=executors, frontend="functional"))
    torch.testing.assert_close(got, want)


def test_results_are_the_tensors_closed_over() -> None:
    model = Counts()
    _, count, rest = tessera.jit(model, frontend="functional")(torch.ones(3))
    assert count is model.count
    assert rest.data_ptr() == model.count[1:].data_ptr()


def test_an_argument_that_is_the_tensor_closed_over() -> None:
    held = torch.ones(3)

    def program(x: torch.Tensor) -> torch.Tensor:
        held.mul_(2)
        return x + held

    fast = tessera.jit(program, frontend="functional")
    torch.testing.assert_close(fast(torch.zeros(3)), torch.full((3,), 2.0))
    torch.testing.assert_close(fast(held), torch.full((3,), 8.0))


def test_literals_are_new_at_each_call() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        start = torch.tensor([1.0, 2.0, 3.0])
        start.add_(x)
        return start

    fast = tessera.jit(program, frontend="functional")
    for _ in range(2):
        torch.testing.assert_close(fast(torch.ones(3)), torch.tensor([2.0, 3.0, 4.0]))


def test_what_is_written_with_gradients_has_them_at_the_next_call() -> None:
    class Running(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.total = torch.nn.Parameter(torch.ones(3)), torch.zeros(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += self.weight * x
            return self.total.sin()

    results = []
    for way in (lambda m: m, lambda m: tessera.jit(m, frontend="functional"), tessera.jit):
        model, x = Running(), torch.tensor([1.0, 2.0, 3.0])
        fast = way(model)
        for _ in range(3):
            out = fast(x)
        out.sum().backward()
        results.append((out.detach(), model.weight.grad))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_a_tensor_closed_over_that_is_made_to_require_a_gradient() -> None:
    scale = torch.ones(3)
    fast = tessera.jit(lambda x: x * scale, frontend="functional")
    x = torch.randn(3, requires_grad=True)
    fast(x)
    scale.requires_grad_()
    fast(x).sum().backward()
    torch.testing.assert_close(scale.grad, x.detach())
    with torch.no_grad():
        assert not fast(x).requires_grad
