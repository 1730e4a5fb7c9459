"""The bridge to autograd: what forward saved dies with its last reader in backward, unless the graph is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

import tessera
from tessera.runtime.autograd import Bridge, bridge


def joined(seen: list[bool]):  # noqa: ANN201
    """x * 3 with two saved tensors; `seen` tells whether each was gone once backward had let go of it."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 3, x + 1, x + 2

    def backward(given: list[torch.Tensor]) -> tuple[torch.Tensor]:
        first, second, ct = given
        given.clear()
        held = [weakref.ref(first), weakref.ref(second)]
        del first
        seen.append(held[0]() is None)
        del second
        seen.append(held[1]() is None)
        return (ct * 3,)

    plan = Bridge(1, (), (0,), (0,), 1, (0, 1), (), (-1, -1), (), (), ((0,),), (), (0,), ((),), (), ())
    return bridge(forward, backward, plan, again=lambda *_: pytest.fail("nobody asked for a second derivative"))


@pytest.mark.parametrize("keep", [False, True])
def test_saved_tensors_die_with_their_last_reader(keep: bool) -> None:
    seen: list[bool] = []
    x = torch.ones(4, requires_grad=True)
    (y,) = joined(seen)(x)
    y.sum().backward(retain_graph=keep)
    assert seen == [not keep, not keep]
    assert torch.equal(x.grad, torch.full((4,), 3.0))
    if keep:
        y.sum().backward()
        assert seen == [False, False, True, True] and torch.equal(x.grad, torch.full((4,), 6.0))


def test_windows_that_overlap_as_a_result() -> None:
    """A cotangent cannot be laid out as such a result is: its elements share memory."""
    x, ct = torch.randn(6, 2, requires_grad=True), torch.randn(5, 2, 2)
    want = torch.autograd.grad((x * 2).unfold(0, 2, 1), x, ct)
    for dynamic in (None, True):
        torch._dynamo.reset()
        got = tessera.jit(lambda x: (x * 2).unfold(0, 2, 1), strict=True, dynamic=dynamic)(x)
        torch.testing.assert_close(torch.autograd.grad(got, x, ct), want)


def lazily_negative(out):
    return torch.complex(*out).conj()


def lazily_conjugate(out):
    return (out[0] + out[1]).conj()


@pytest.mark.parametrize(
    "program, after",
    [
        (lambda x: ((x.sin() * 2).sum(), (x.cos() * 3).exp().sum()), lazily_negative),
        (lambda x: (x.sin() * 2, (x.cos() * 3).exp()), lazily_negative),
        (lambda x: (torch.complex(x.sin(), x), (x * 1j).exp()), lazily_conjugate),
    ],
    ids=["numbers", "tensors", "complex"],
)
def test_cotangents_whose_memory_holds_something_else(program, after) -> None:
    """A gradient of a complex number may come as a view that negates or conjugates when it is read."""
    grads = []
    for fn in (tessera.jit(program, strict=True), program):
        x = torch.linspace(0.1, 1, 5, dtype=torch.float64).requires_grad_()
        w = after(fn(x))
        w.backward(torch.full_like(w, 1 + 2j))
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def assigned(fn, w: torch.Tensor, new: Callable, again: bool) -> list[torch.Tensor]:
    """Gradients where somebody assigns to the `.data` of a weight between forward and backward."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    y = fn(x, w)
    w.data = new(w.data)
    if not again:
        return [y.detach(), *torch.autograd.grad(y.sum(), (x, w))]
    grads = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
    return [y.detach(), *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), (x, w))]  # type: ignore[arg-type]


PROGRAMS_OF_A_WEIGHT = {
    "linear": lambda x, w: torch.nn.functional.linear(x, w).tanh(),
    "product": lambda x, w: (x * w[0]).exp(),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("program", PROGRAMS_OF_A_WEIGHT)
def test_a_backward_reads_what_forward_read(program: str, again: bool) -> None:
    """As eager does of a linear layer's weight. Of a factor, which eager saves itself, it reads the new contents."""
    fn = PROGRAMS_OF_A_WEIGHT[program]
    weight = torch.linspace(0, 1, 20, dtype=torch.float64).view(5, 4)
    want = assigned(fn, weight.clone().requires_grad_(), lambda w: w, again)
    for new in (lambda w: w * 2, lambda w: w[:1].clone(), lambda w: w.t().contiguous().t() * 3):
        shape_kept = new(weight).shape == weight.shape
        if again and not shape_kept:
            continue  # autograd itself refuses a gradient that does not fit
        got = assigned(tessera.jit(fn), weight.clone().requires_grad_(), new, again)
        torch.testing.assert_close(got, want)


def test_writes_of_a_weight_are_counted() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    y = tessera.jit(torch.nn.functional.linear)(torch.randn(2, 4, requires_grad=True), w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
