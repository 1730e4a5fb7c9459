"""Results that are views of what backward reads: whoever writes them is told, as in eager."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tessera

VIEWS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "transposed": lambda x: torch.softmax(x * 2, -1).t(),
    "a slice": lambda x: torch.tanh(x)[1:],
    "one of two parts": lambda x: torch.sigmoid(x).chunk(2, 0),
    "reshaped": lambda x: x.exp().view(-1, 2),
    "a part of a part": lambda x: x.exp()[1:][:, :1],
}
WAYS = {"dynamo": {}, "functional": {"frontend": "functional"}, "aten": {"executors": ["aten"]}}


def last(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out if isinstance(out, Tensor) else out[-1]


def gradient(call: Callable, x: Tensor, write: bool) -> Tensor:
    out = call(x)
    if write:
        with torch.no_grad():
            last(out).mul_(2)
    return torch.autograd.grad(sum(o.sum() for o in ((out,) if isinstance(out, Tensor) else out)), x)[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", VIEWS)
def test_a_written_view_of_what_is_saved(name: str, way: str) -> None:
    """Refused as in eager, or right: a kernel's result may be memory of its own."""
    x = torch.randn(4, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="inplace"):
        gradient(VIEWS[name], x, write=True)
    fast = tessera.jit(VIEWS[name], strict=True, **WAYS[way])
    try:
        got = gradient(fast, x, write=True)
    except RuntimeError as error:
        assert "inplace" in str(error)
    else:
        assert way != "aten"
        torch.testing.assert_close(got, gradient(VIEWS[name], x, write=False))


@pytest.mark.parametrize("name", VIEWS)
def test_views_that_nobody_writes(name: str) -> None:
    fast = tessera.jit(VIEWS[name], strict=True)
    mine, theirs = (torch.linspace(-1, 1, 8).view(4, 2).requires_grad_() for _ in range(2))
    for call, x in ((fast, mine), (VIEWS[name], theirs)):
        last(call(x)).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_nothing_is_kept_alive() -> None:
    fast = tessera.jit(VIEWS["transposed"], strict=True)
    out = fast(torch.randn(4, 2, requires_grad=True))
    gone = weakref.ref(out)
    del out
    assert gone() is None


COMPLEX: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "imaginary part": lambda y: (y.imag**2,),
    "both parts": lambda y: (y.real * y.imag,),
    "conjugate": lambda y: (y.conj() ** 2,),
    "part of the conjugate": lambda y: (y.conj().imag, y.conj().imag ** 2),
    "as real numbers": lambda y: (torch.view_as_real(y)[..., 1] ** 2,),
    "other bits": lambda y: (y.real.contiguous().view(torch.int32).float() * 0 + y.real**2,),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COMPLEX)
def test_what_is_saved_is_another_view_of_a_complex_result(name: str, way: str) -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, *COMPLEX[name](y)

    def observed(call: Callable) -> Tensor:
        out = call(x)[1:]
        return torch.autograd.grad(sum((o * o.conj()).real.sum() for o in out), x)[0]

    torch._dynamo.reset()
    x = torch.randn(4, 2, dtype=torch.complex64, requires_grad=True)
    torch.testing.assert_close(observed(tessera.jit(program, **WAYS[way])), observed(program))


def half(x: Tensor) -> Tensor:
    return x[x.shape[0] // 2 :]


def halves(x: Tensor) -> tuple[Tensor, ...]:
    return x.tensor_split(2)


def result_and_half(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 1
    return y, y[x.shape[0] // 2 :]


@pytest.mark.parametrize("fn", [half, halves, result_and_half])
def test_a_view_whose_place_is_a_symbol_is_a_view_to_autograd(fn: Callable) -> None:
    """Writing it gives what it is a view of another history."""

    def grads(fn: Callable) -> tuple[Tensor, Tensor]:
        leaf = torch.arange(6.0).requires_grad_()
        base = leaf * 1
        out = fn(base)
        weight = torch.full((), 3.0, requires_grad=True)
        last(out).mul_(weight)
        whole: Tensor = out[0] if gives_its_base else base
        (whole * torch.arange(6.0)).sum().backward()
        assert leaf.grad is not None and weight.grad is not None
        return leaf.grad, weight.grad

    gives_its_base = fn is result_and_half
    torch.testing.assert_close(grads(tessera.jit(fn, dynamic=True, executors=["aten"])), grads(fn))


def test_a_view_of_a_leaf_whose_place_is_a_symbol_is_not_written() -> None:
    view = tessera.jit(half, dynamic=True, executors=["aten"])(torch.arange(6.0).requires_grad_())
    with pytest.raises(RuntimeError, match="a view of a leaf"):
        view.mul_(2)


OVERWRITES: dict[str, Callable[[Tensor], object]] = {
    "zeros in a reshaped one": lambda y: y.view(-1).zero_(),
    "a number in a transposed one": lambda y: y.t().fill_(0.5),
    "a tensor in a reshaped one": lambda y: y.view(4).copy_(torch.ones(4, dtype=y.dtype)),
    "zeros in a part": lambda y: y[:1].zero_(),
    "zeros in itself": lambda y: y.zero_(),
}


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize("name", OVERWRITES)
def test_whether_the_gradient_of_what_was_overwritten_requires_grad(name: str, frontend: str) -> None:
    """Where a view was written, autograd makes that gradient of the gradient of the result."""

    def grads(compiled: Callable) -> list:
        def made(x: Tensor, read: Callable) -> Tensor:
            y = x * 2
            OVERWRITES[name](y)
            return read(y)

        found = []
        for read in (torch.sigmoid, torch.neg):
            x = torch.linspace(-1, 1, 4, dtype=torch.float64).view(2, 2).requires_grad_()
            out = compiled(lambda x, read=read: made(x, read))(x)
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            again = torch.autograd.grad(g.sum(), x)[0] if g.requires_grad else None
            found.append((g.requires_grad, g.detach(), again))
        return found

    ours = grads(lambda fn: tessera.jit(fn, strict=True, frontend=frontend))
    torch.testing.assert_close(ours, grads(lambda fn: fn))


def conjugate_through_an_alias(x: Tensor) -> tuple[Tensor, ...]:
    y = x.conj()
    y.detach().exp_()
    return y.expand_as(y).real * 1, y.imag * 1


def negative_part(x: Tensor) -> tuple[Tensor, ...]:
    y = x.conj().imag
    y.mul_(3)
    return y + 1, y.t().exp()


def conjugate_of_a_shape(x: Tensor) -> tuple[Tensor, ...]:
    y = x.mH
    y.sin_()
    return (y @ y.mH).abs(), y.real + 0


@pytest.mark.parametrize("fn", [conjugate_through_an_alias, negative_part, conjugate_of_a_shape])
def test_conjugates_that_were_written_are_conjugates_still(fn: Callable) -> None:
    def observed(call: Callable) -> list[Tensor]:
        start = x.clone().requires_grad_()
        given = start * 1
        out = call(given)
        return [*out, given, *torch.autograd.grad(sum(o.sum() for o in out), start)]

    torch._dynamo.reset()
    x = torch.randn(2, 2, dtype=torch.complex128)
    want = observed(fn)
    torch.testing.assert_close(observed(tessera.jit(fn)), want)
    torch.testing.assert_close(observed(tessera.jit(fn, executors=["aten"], strict=True)), want)
