"""Gradients of some results of a graph alone: what the others are made of takes no part, as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.runtime.double_backward import DoubleBackward
from tessera.torch_internals.autograd import unpacks_one_by_one

FRONTENDS = ["dynamo", "functional"]


def infinite(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x * w, x.log() * w, (x * w).exp()


def chained(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = torch.tanh(x @ w.diag())
    return hidden, hidden.sqrt() / hidden.abs().sqrt().log(), hidden.sum(-1) / x.prod(-1)


def dropped(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kept = nn.functional.dropout(x * w, 0.5)
    return kept.sin(), kept / x, kept.cumsum(0).log()


def observed(f: Callable, chosen: tuple[int, ...]) -> list[torch.Tensor | None]:
    x = torch.tensor([[0.0, 1.0, 2.0, -1.0], [3.0, 0.0, 0.5, 1.0]], requires_grad=True)
    w = torch.tensor([1.0, 2.0, 0.0, 4.0], requires_grad=True)
    torch.manual_seed(0)
    out = f(x * 1, w)
    sum(out[i].sum() for i in chosen).backward()
    return [x.grad, w.grad]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("executors", [["aten"], None], ids=["aten", "default"])
@pytest.mark.parametrize("program", [infinite, chained, dropped])
def test_zeros_do_not_meet_infinity(program: Callable, frontend: str, executors: list[str] | None) -> None:
    fast = tessera.jit(program, executors=executors, frontend=frontend)
    for chosen in ((0,), (1,), (0, 2), (2, 1), (0, 1, 2), (0,)):
        want, got = observed(program, chosen), observed(fast, chosen)
        torch.testing.assert_close(got, want, equal_nan=True)


def test_kept_graphs_and_second_derivatives() -> None:
    fast = tessera.jit(infinite, executors=["aten"])
    results = []
    for f in (infinite, fast):
        x, w = torch.tensor([0.0, 1.0], requires_grad=True), torch.ones(2, requires_grad=True)
        a, _, c = f(x, w)
        a.sum().backward(retain_graph=True)
        (c * 2).sum().backward(retain_graph=True)
        (gx,) = torch.autograd.grad((c**2).sum(), x, create_graph=True)
        gx.sum().backward()
        results.append([x.grad, w.grad])
    torch.testing.assert_close(results[1], results[0])


def test_zeros_that_are_only_added_need_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model gives its logits beside its loss: nobody compiles twice for that."""

    def refuse(*_: object) -> None:
        raise AssertionError("expected the one backward program")

    monkeypatch.setattr(DoubleBackward, "__call__", refuse)

    def model(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x @ w
        logits = hidden.tanh() @ w
        return logits.square().mean(), logits, hidden, hidden.view(-1)[:2]

    w = torch.eye(3).requires_grad_()
    tessera.jit(model, executors=["aten"])(torch.ones(2, 3), w)[0].backward()
    assert w.grad is not None


def test_what_nothing_saved_is_not_asked_for() -> None:
    """The program for some results alone would read a buffer that the ordinary backward does not."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(16.0).view(4, 4))
            self.register_buffer("shift", torch.arange(4.0))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = torch.rsub(self.weight, self.shift)
            y.copy_(y)
            return y @ y.mT, y, torch.atan2(x, x)

    grads = []
    for make in (lambda m: m, lambda m: tessera.jit(m, strict=True)):
        model = Model()
        first, *_ = make(model)(torch.ones(3, requires_grad=True) * 1)
        first.sum().backward(retain_graph=True)
        grads.append(model.weight.grad)
    torch.testing.assert_close(grads[1], grads[0])


def _erf_too(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.maximum(x, w)
    return y, y.erf()


def _two_softmaxes(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.softmax(0), w.softmax(0)


def _product_too(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sin(), x @ w


def _quotient_computed_again(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A quotient's gradient computes the quotient by itself, and reads none that was given to the caller."""
    y = x.exp() / w.exp()
    return y, y.erf()


@pytest.mark.skipif(not unpacks_one_by_one, reason="this PyTorch hands out saved tensors all at once")
@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("program", "written", "chosen"),
    [(_erf_too, 0, 0), (_two_softmaxes, 0, 1), (_product_too, "w", 0), (_quotient_computed_again, 0, 0)],
)
def test_what_a_gradient_does_not_read_may_be_written(
    program: Callable, written: int | str, chosen: int, keep: bool, frontend: str
) -> None:
    fast = tessera.jit(program, executors=["aten"], frontend=frontend)
    results = []
    for f in (program, fast):
        x, w = torch.tensor([0.5, 1.0], requires_grad=True), torch.tensor([2.0, 0.25], requires_grad=True)
        held = w * 1
        out = f(x, held)
        with torch.no_grad():
            (held if written == "w" else out[written]).add_(1)
        out[chosen].sum().backward(retain_graph=keep)
        results.append([x.grad, w.grad])
        with pytest.raises(RuntimeError, match="modified by an inplace operation" if keep else "second time|inplace"):
            out[1 - chosen].sum().backward()
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.skipif(not unpacks_one_by_one, reason="this PyTorch hands out saved tensors all at once")
def test_a_size_is_read_off_what_was_written() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reciprocal = x.reciprocal()
        return reciprocal, torch.cat([y, y]).sin()

    fast = tessera.jit(program, executors=["aten"], dynamic=True)
    results = []
    for f in (program, fast):
        for rows in (2, 3):
            x, y = torch.ones(rows, 2, requires_grad=True), torch.ones(rows, 2, requires_grad=True)
            first, second = f(x, y * 1)
            with torch.no_grad():
                first.mul_(2)
            second.sum().backward()
            results.append((x.grad, y.grad))
    torch.testing.assert_close(results[2:], results[:2])


class PlusOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # noqa: ANN001, ANN205
        return x.clone()

    @staticmethod
    def backward(ctx, ct):  # noqa: ANN001, ANN205
        return ct + 1


def hooked(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = (x * w).sin()
    hidden.register_hook(lambda g: g + 1)
    return x * w, hidden


def hooked_after_a_checkpoint(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first = x * w
    hidden = checkpoint(torch.sin, first, use_reentrant=False)
    hidden.register_hook(lambda g: g + 1)
    return first, hidden


def of_a_function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first = x * w
    return first, PlusOne.apply(first.sin()), PlusOne.apply(first)


@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("f", [hooked, hooked_after_a_checkpoint, of_a_function], ids=lambda f: f.__name__)
def test_a_backward_that_adds_something_runs_only_where_a_gradient_arrives(f: Callable, chosen: tuple) -> None:
    """Zeros in place of a gradient that is missing would become ones."""
    torch._dynamo.reset()
    torch.testing.assert_close(observed(tessera.jit(f), chosen), observed(f, chosen))


class Branches(torch.nn.Module):
    """Two results, of which one goes through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        behind = self.layer(x)  # the graph ends here, and both results come from the next one
        return x.sin(), behind.cos()


@pytest.mark.parametrize("order", [(0,), (1,), (0, 1)], ids=str)
def test_hooks_of_a_module_run_only_where_a_gradient_arrives(order: tuple[int, ...]) -> None:
    """A full backward hook gets no zeros, and the layer no gradient of zeros."""
    seen = []
    for make in (lambda m: m, tessera.jit):
        torch.manual_seed(0)
        model, calls = Branches(), []
        model.layer.register_full_backward_hook(lambda _, into, out, calls=calls: calls.append((into, out)))
        x = torch.ones(3, 2, requires_grad=True)
        out = make(model)(x)
        for chosen in order:  # what was spared once runs when its gradient comes
            out[chosen].sum().backward(retain_graph=True)
        seen.append((x.grad, model.layer.weight.grad, calls))
    torch.testing.assert_close(seen[1], seen[0])


@pytest.mark.parametrize("chosen", [0, 1])
def test_full_backward_hooks_around_results_that_have_nothing_in_common(chosen) -> None:
    """A module's results are one node to autograd, so that all of the module is gone through."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.weight.sin(), x + 1

    seen = []
    for make in (lambda m: m, tessera.jit):
        model, calls = Apart(), []
        model.register_full_backward_hook(lambda _, into, out, calls=calls: calls.append((into, out)))
        x = torch.ones(3, 2, requires_grad=True)
        make(model)(x)[chosen].sum().backward()
        seen.append((x.grad, model.weight.grad, calls))
    assert len(seen[0][2]) == 1
    torch.testing.assert_close(seen[1], seen[0])


def test_no_zeros_come_to_modules_behind_one_that_no_gradient_reaches() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(4))
            self.layer = nn.Linear(4, 4)

        def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
            twice = self.layer(self.layer(torch.sigmoid(self.weight)))
            return self.layer(self.weight).sin(), twice * 2

    def calls(compile: Callable) -> list:
        model, seen = Chain(), []
        f = compile(model)
        model.layer.register_full_backward_hook(lambda _, given, got: seen.append((given[0], got[0])))
        out = f()
        out[0].sum().backward(retain_graph=True)
        seen.append(len(seen))
        out[1].sum().backward()
        return [*seen, *(p.grad for p in model.parameters())]

    torch.testing.assert_close(calls(tessera.jit), calls(lambda model: model))


def test_hooks_of_what_a_graph_is_given_run_only_where_a_gradient_arrives() -> None:
    """A hook need not know of None: eager never gives it any here."""

    def seen(f: Callable) -> list[object]:
        x, y = (torch.arange(3.0, requires_grad=True) for _ in range(2))
        given, other, calls = x * 2, y * 2, []
        given.register_hook(lambda g: calls.append(g.clone()) or g * 2)
        out = f(given, other)
        out[1].sum().backward(retain_graph=True)
        calls.append(len(calls))
        sum(o.sum() for o in out).backward()
        return [*calls, x.grad, y.grad]

    def apart(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin() * 2, y.cos() * 3

    torch.testing.assert_close(seen(tessera.jit(apart)), seen(apart))


class Looks(torch.autograd.Function):
    """Its backward looks which cotangents there are."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        return (5 if a is None else a) + (7 if b is None else b)


def test_a_function_that_looks_which_cotangents_there_are() -> None:
    """What is only added may be zeros, but not where a user's function asks for None."""
    fast = tessera.jit(lambda x: Looks.apply(x), frontend="functional", strict=True)
    for pick in (lambda a, b: a, lambda a, b: b, lambda a, b: a + b):
        x = torch.ones(3, requires_grad=True)
        got, want = (torch.autograd.grad(pick(*fn(x)).sum(), x) for fn in (fast, Looks.apply))
        torch.testing.assert_close(got, want)
