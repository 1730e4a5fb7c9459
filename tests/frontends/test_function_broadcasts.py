"""What autograd does with a gradient that has another shape than the argument of a torch.autograd.Function: it sums
where the argument was broadcast, and refuses any other shape."""

from __future__ import annotations

# ruff: noqa: ANN001, ANN205
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tessera as t

SHAPES = [((1, 4), (2, 4)), ((4,), (2, 4)), ((), (3,)), ((2, 1), (4,)), ((3, 1, 2), (1, 5, 1)), ((2, 4), (2, 4))]


class Gate(torch.autograd.Function):
    """Its gradients have the shape of the result, whatever the arguments' are."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * torch.sigmoid(y)

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        s = torch.sigmoid(y)
        return g * s, g * x * s * (1 - s)


class Wrong(Gate):
    """Its first gradient has a shape that nothing was broadcast to."""

    @staticmethod
    def backward(ctx, g):
        return g.new_ones(7), g * 2


def gradients(f: Callable, *shapes: tuple[int, ...]) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    leaves = [torch.randn(s, generator=source, dtype=torch.float64).requires_grad_() for s in shapes]
    out = f(*(x * 2 for x in leaves))
    (out * torch.randn(out.shape, generator=source, dtype=torch.float64)).sum().backward()
    return [x.grad for x in leaves]  # type: ignore[misc]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_gradients_are_summed(shapes: tuple) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return Gate.apply(x.cos(), y).sin()  # type: ignore[no-untyped-call]

    want = gradients(f, *shapes)
    compiled = t.jit(f)
    for got in (gradients(compiled, *shapes), gradients(t.jit(f, frontend="functional"), *shapes)):
        for a, b in zip(got, want, strict=True):
            assert_close(a, b)


def test_sizes_that_change() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return Gate.apply(x[None], y)  # type: ignore[no-untyped-call]

    compiled = t.jit(f)
    for rows in (1, 2, 5, 7):
        for a, b in zip(gradients(compiled, (4,), (rows, 4)), gradients(f, (4,), (rows, 4)), strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None)], ids=str)
def test_examples_of_a_batch(dims: tuple) -> None:
    """The sum is over what each example broadcasts, never over the batch."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (Gate.apply(x, y) ** 2).sum()  # type: ignore[no-untyped-call]

    sizes = [[3, *s] if d == 0 else list(s) for s, d in zip([(4,), (3, 4)], dims, strict=True)]
    x, y = (torch.randn(s, dtype=torch.float64) for s in sizes)
    got = t.vmap(t.grad(loss, (0, 1)), dims)(x, y)
    rows = [[v[i] if d == 0 else v for v, d in zip((x, y), dims, strict=True)] for i in range(3)]
    want = [torch.autograd.grad(loss(*row), row) for row in ([v.detach().requires_grad_() for v in r] for r in rows)]
    for mine, theirs in zip(got, zip(*want, strict=True), strict=True):
        assert_close(mine, torch.stack(theirs))


class Complex(Gate):
    @staticmethod
    def backward(ctx, g):
        return g * 1j, None


@pytest.mark.filterwarnings("error")
def test_a_complex_gradient_of_a_real_argument_is_refused() -> None:
    for run in (Complex.apply, t.jit(lambda x, y: Complex.apply(x, y)), t.jit(Complex.apply, frontend="functional")):  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError):
            gradients(run, (2, 4), (2, 4))


HOOKS: list[Callable] = [lambda g: g.float(), lambda g: g.expand(2, *g.shape), lambda g: g.sum(), lambda g: g[:1]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("hook", range(len(HOOKS)))
def test_a_hook_that_changes_type_or_size_is_refused(hook: int) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(HOOKS[hook])
        return y * 3

    for run in (f, t.jit(f)):
        with pytest.raises(RuntimeError, match="has changed the (type|size) of value"):
            gradients(run, (2, 3))


@pytest.mark.filterwarnings("error")
def test_another_shape_is_refused() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return Wrong.apply(x, y)  # type: ignore[no-untyped-call]

    told = r"returned an invalid gradient at index \d - got \[7\] but expected shape compatible with \[2, 4\]"
    for run in (f, t.jit(f)):
        with pytest.raises(RuntimeError, match=told):
            gradients(run, (2, 4), (2, 4))
    x = torch.ones(2, 4)
    assert_close(t.jit(f)(x, x), f(x, x))  # who asks for no gradient is not bothered
