"""Gradients turned on and off inside a program, and asked for inside it, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import tessera

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
X = torch.arange(6, dtype=torch.float64).view(2, 3) / 6


@torch.no_grad()
def guided(x):  # noqa: ANN001, ANN201
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(NET(inner).square().sum(), inner)
    return x - g


@torch.no_grad()
def langevin(x):  # noqa: ANN001, ANN201
    for _ in range(3):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(NET(x).sum(), x)
        x = x - 0.1 * g + 0.01 * torch.randn_like(x)
    return x


@torch.no_grad()
def adapted(x):  # noqa: ANN001, ANN201
    """MAML at inference."""

    def net(w, b, v, c):  # noqa: ANN001, ANN202
        return F.linear(torch.tanh(F.linear(x, w, b)), v, c)

    with torch.enable_grad():
        now = [p.detach().clone().requires_grad_() for p in NET.parameters()]
        for _ in range(2):
            grads = torch.autograd.grad(net(*now).square().mean(), now, create_graph=True)
            now = [p - 0.1 * g for p, g in zip(now, grads, strict=True)]
    return net(*now)


def through_backward(x):  # noqa: ANN001, ANN201
    with torch.enable_grad():
        inner = x.detach().clone().requires_grad_()
        NET(inner).square().sum().backward()
    return x + inner.grad


def penalised(x):  # noqa: ANN001, ANN201
    """The gradient of one value of the program by another."""
    x = x * 2
    y = NET(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + g.square().sum()


def by_torch_func(x):  # noqa: ANN001, ANN201
    return torch.func.grad(lambda y: NET(y).square().sum())(x)


def nested(x):  # noqa: ANN001, ANN201
    with torch.set_grad_enabled(False):
        a = x * 2
        with torch.set_grad_enabled(True):
            b = x * 3
            with torch.no_grad():
                c = x.exp()
            b = b + c * x
        d = x * 4
    return a, b, c, d, x.sin()


@torch.enable_grad()
def decorated(x):  # noqa: ANN001, ANN201
    return NET(x).square()


def writing(x):  # noqa: ANN001, ANN201
    with torch.enable_grad():
        y = x * 2
    kept = torch.zeros_like(x)
    kept.copy_(y.detach())
    return y, kept


@pytest.fixture(autouse=True)
def fresh():  # noqa: ANN201
    torch._dynamo.reset()
    yield
    NET.zero_grad()


def results(f: Callable, compiled: Callable, mode: Callable) -> list:
    torch.manual_seed(0)
    x = X.clone().requires_grad_()
    with mode():
        out = compiled(f)(x)
    out = out if isinstance(out, tuple) else (out,)
    found: list = [y.requires_grad for y in out]
    flowing = [y.square().sum() for y in out if y.requires_grad]
    if flowing:
        found += torch.autograd.grad(sum(flowing), [x, *NET.parameters()], allow_unused=True)
    return [*(y.detach() for y in out), *found]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=["no_grad", "enable_grad"])
@pytest.mark.parametrize(
    "f",
    [guided, langevin, adapted, through_backward, by_torch_func, nested, decorated, writing],
    ids=lambda f: f.__name__,
)
def test_gradients_inside(f: Callable, mode: Callable) -> None:
    want = results(f, lambda f: f, mode)
    NET.zero_grad()
    got = results(f, lambda f: tessera.jit(f, strict=True, executors=("sdpa", "aten")), mode)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        if isinstance(w, torch.Tensor):
            torch.testing.assert_close(g, w)
        else:
            assert g is w


def test_a_gradient_between_values_of_the_program() -> None:
    for g, w in zip(
        results(penalised, tessera.jit, torch.enable_grad),
        results(penalised, lambda f: f, torch.enable_grad),
        strict=True,
    ):
        torch.testing.assert_close(g, w)


def test_inference_mode_wins() -> None:
    fast = tessera.jit(decorated, strict=True)
    with torch.inference_mode():
        assert not fast(X).requires_grad
    assert fast(X).requires_grad


def test_errors_are_eagers() -> None:
    fast = tessera.jit(lambda x: x.sin(), strict=True)
    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
        fast(X).sum().backward()
    y = fast(X.clone().requires_grad_()).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        y.backward()


def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        shown = x[::2]
        y = shown * 3
    return y, shown, y[:1], x[1:]


def views_alone(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        shown = x[::2]
    return shown, x[1:]


@pytest.mark.parametrize("program", [views, views_alone])
@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_views_made_with_gradients_have_histories(program: Callable, frontend: str) -> None:
    results = []
    for f in (program, tessera.jit(program, executors=["aten"], frontend=frontend)):
        x = torch.arange(4.0).requires_grad_()
        with torch.no_grad():
            out = f(x)
        flags = [y.requires_grad for y in out]
        sum(y.sum() * (i + 1) for i, y in enumerate(out) if y.requires_grad).backward()
        results.append((flags, x.grad.tolist()))
    assert results[0] == results[1]


def _pushed(t: object, f: Callable, x: torch.Tensor) -> object:
    return t.jvp(f, (x,), (torch.ones_like(x),))  # type: ignore[attr-defined]


def _columns(t: object, f: Callable, x: torch.Tensor) -> object:
    return t.jacfwd(f)(x)  # type: ignore[attr-defined]


MODES = {"no_grad": torch.no_grad, "enable_grad": torch.enable_grad, "as it is": nullcontext}


@pytest.mark.parametrize("transform", [_pushed, _columns])
@pytest.mark.parametrize("around", MODES)
@pytest.mark.parametrize("between", MODES)
def test_gradients_on_inside_forward_mode(transform: Callable, around: str, between: str) -> None:
    """torch.func's results say that they require gradients, which end at the views it makes of its arguments."""

    def seen(t: object) -> list:
        def inner(x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return x.sin() * x

        def outer(x: torch.Tensor) -> object:
            with MODES[between]():
                return transform(t, inner, x)

        found = []
        for f in (inner, outer):
            x = torch.linspace(0.1, 1, 3, dtype=torch.float64).requires_grad_()
            with MODES[around]():
                outs = tree_leaves(transform(t, f, x))
            for o in outs:
                grads = torch.autograd.grad(o.sum(), x, retain_graph=True, allow_unused=True) if o.requires_grad else ()
                found.append((o.detach(), o.requires_grad, grads))
        return found

    torch.testing.assert_close(seen(tessera), seen(torch.func))
