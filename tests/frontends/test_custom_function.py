"""torch.autograd.Function with all it may say of itself, under every transform, under jit and in eager autograd.

Derivatives here are wrong on purpose (by a factor): that the function's own was used shows.
"""

from __future__ import annotations

# ruff: noqa: ANN001, ANN202, ANN205
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.func as tf
from torch.autograd.function import once_differentiable
from torch.testing import assert_close

import tessera as t
from tessera.util.config import override
from tessera.util.errors import DoubleBackwardError, InputError

Function = torch.autograd.Function


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    """Nothing here may fall back on torch.func or on eager."""
    with override(strict=True):
        yield


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(0))


class Product(Function):
    """Computes only what is needed."""

    seen: list[tuple[bool, ...]] = []

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, ct):
        x, y = ctx.saved_tensors
        Product.seen.append(ctx.needs_input_grad)
        return ct * y * 2 if ctx.needs_input_grad[0] else None, ct * x * 3 if ctx.needs_input_grad[1] else None


def test_needs_input_grad(x: torch.Tensor) -> None:
    y = x + 1

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, y).sum()

    assert_close(t.grad(loss)(x, y), 2 * y)
    assert Product.seen[-1] == (True, False)
    assert_close(t.grad(loss, 1)(x, y), 3 * x)
    assert Product.seen[-1] == (False, True)
    assert_close(t.grad(loss, (0, 1))(x, y), (2 * y, 3 * x))
    assert_close(t.vmap(t.grad(Product.apply))(x, y), 2 * y)
    assert_close(t.grad(lambda x: t.vmap(Product.apply)(x, y).sum())(x), 2 * y)
    assert_close(t.jvp(lambda x: Product.apply(x, y), (x,), (x,))[1], 2 * y * x)
    assert_close(t.grad(lambda y: t.grad(loss)(x, y).sum())(y), torch.full((3,), 2.0))


class Pair(Function):
    @staticmethod
    def forward(x, y):
        return x.sin(), y.cos()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, gx, gy):
        assert gx is not None or gy is not None
        x, y = ctx.saved_tensors
        return None if gx is None else gx * x, None if gy is None else gy * y * 7


def test_cotangents_that_are_missing(x: torch.Tensor) -> None:
    y = x + 1
    assert_close(t.grad(lambda x, y: Pair.apply(x, y)[0].sum(), (0, 1))(x, y), (x, torch.zeros(3)))
    assert_close(t.grad(lambda x, y: Pair.apply(x, y)[1].sum(), (0, 1))(x, y), (torch.zeros(3), 7 * y))
    assert_close(t.vmap(t.grad(lambda x, y: Pair.apply(x, y)[1], 1))(x, y), 7 * y)


class Tripled(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(3)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        return ct * 30 + 0 * x


def written(x: torch.Tensor) -> torch.Tensor:
    z = x.sin()
    assert Tripled.apply(z) is z
    return (z * 2).sum()


def test_dirty_inputs(x: torch.Tensor) -> None:
    assert_close(t.grad(written)(x), 60 * x.cos())
    assert_close(t.value_and_grad(written)(x)[0], 6 * x.sin().sum())
    leaf = x.clone().requires_grad_()
    for options in ({}, {"frontend": "functional"}):
        out = t.jit(written, **options)(leaf)  # type: ignore[arg-type]
        assert_close(out, 6 * x.sin().sum())
        assert_close(torch.autograd.grad(out, leaf)[0], 60 * x.cos())


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        return ct * x.cos() * 2


def test_once_differentiable(x: torch.Tensor) -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        return t.grad(lambda x: Once.apply(x).sum())(x)

    assert_close(gradient(x), 2 * x.cos())
    assert_close(t.vmap(t.grad(Once.apply))(x), 2 * x.cos())
    with pytest.raises(DoubleBackwardError, match="once_differentiable"):
        t.grad(lambda x: gradient(x).sum())(x)
    with pytest.raises(DoubleBackwardError, match="once_differentiable"):
        t.jvp(gradient, (x,), (x,))
    leaf, ct = x.clone().requires_grad_(), torch.ones(3, requires_grad=True)
    (again,) = t.vjp(Once.apply, leaf)[1](ct)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        again.sum().backward()


class Forward(Function):
    """Forward mode only."""

    @staticmethod
    def forward(x):
        return x**2, x.detach() + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return tangent * x * 5, None


def test_a_rule_that_is_missing_matters_only_if_it_is_asked_for(x: torch.Tensor) -> None:
    assert_close(t.jvp(lambda x: Forward.apply(x)[0], (x,), (x,)), (x**2, 5 * x * x))
    assert_close(t.vmap(lambda x: Forward.apply(x)[1])(x), x + 1)
    assert_close(t.vmap(lambda a: t.jvp(lambda a: Forward.apply(a)[0], (a,), (a,))[1])(x), 5 * x * x)
    with pytest.raises(NotImplementedError, match="backward or vjp"):
        t.grad(lambda x: Forward.apply(x)[0].sum())(x)


class Batched(Function):
    """Its batching rule is not its forward over rows: that it was used shows too."""

    @staticmethod
    def forward(x, k):
        return x * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.k = inputs[1]

    @staticmethod
    def backward(ctx, ct):
        return ct * ctx.k * 10, None

    @staticmethod
    def vmap(info, in_dims, x, k):
        assert info.batch_size == 2 and info.randomness == "same" and in_dims == (0, None)
        return Batched.apply(x.movedim(0, -1), k) + 100, -1


def test_a_batching_rule_of_its_own() -> None:
    def batched(func: Callable) -> Callable:
        return t.vmap(func, randomness="same")

    rows = torch.ones(2, 3)
    assert_close(batched(lambda x: Batched.apply(x, 3.0))(rows), torch.full((2, 3), 103.0))
    assert_close(batched(lambda x: Batched.apply(x, k=3.0))(rows), torch.full((2, 3), 103.0))
    assert_close(t.grad(lambda x: batched(lambda x: Batched.apply(x, 3.0))(x).sum())(rows), torch.full((2, 3), 30.0))
    assert_close(batched(t.grad(lambda x: Batched.apply(x, 3.0).sum()))(rows), torch.full((2, 3), 30.0))
    want = tf.vmap(tf.grad(lambda x: Batched.apply(x, 3.0).sum()), randomness="same")(rows)
    assert_close(torch.full((2, 3), 30.0), want)


def test_what_a_batching_rule_must_give() -> None:
    class Lone(Batched):
        @staticmethod
        def vmap(info, in_dims, x, k):
            return x

    class Wide(Batched):
        @staticmethod
        def vmap(info, in_dims, x, k):
            return (x, x), 0

    with pytest.raises(InputError, match="two returns"):
        t.vmap(lambda x: Lone.apply(x, 3.0))(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="returned an incompatible"):
        t.vmap(lambda x: Wide.apply(x, 3.0))(torch.ones(2, 3))


def test_returning_and_saving_an_input(x: torch.Tensor) -> None:
    class Same(Function):
        @staticmethod
        def forward(x):
            return x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, ct):
            return ct

    with pytest.raises(RuntimeError, match="returned as-is"):
        t.grad(lambda x: Same.apply(x.clone()).sum())(x)


class Outer(Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return Product.apply(x, x) * scale["by"]

    @staticmethod
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        return Product.apply(ct, x) * ctx.scale["by"], None


def test_a_function_inside_a_function(x: torch.Tensor) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return Outer.apply(x, {"by": 4.0}).sum()

    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert_close(t.grad(loss)(x), first.detach())
    assert_close(t.grad(lambda x: t.grad(loss)(x).sum())(x), second)


def test_eager_autograd_sees_the_function_s_own_backward(x: torch.Tensor) -> None:
    leaf = x.clone().requires_grad_()
    assert_close(torch.autograd.grad(t.vmap(Product.apply)(leaf, x).sum(), leaf)[0], 2 * x)
    assert_close(torch.autograd.grad(t.vmap(lambda x: Pair.apply(x, x)[0])(leaf).sum(), leaf)[0], x)
    out, _ = t.vjp(Product.apply, leaf, x)
    assert_close(torch.autograd.grad(out.sum(), leaf)[0], 2 * x)
    double = t.custom_vjp(lambda x: x * 2)
    double.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 10,))
    assert_close(torch.autograd.grad(t.vmap(double)(leaf).sum(), leaf)[0], torch.full((3,), 10.0))


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_jit(x: torch.Tensor, frontend: str) -> None:
    leaf = x.clone().requires_grad_()

    def gradient(func: Callable) -> torch.Tensor:
        return torch.autograd.grad(t.jit(func, frontend=frontend)(leaf), leaf)[0]

    assert_close(gradient(lambda x: Product.apply(x, x + 1).sum()), 2 * (x + 1) + 3 * x)
    assert_close(gradient(lambda x: Once.apply(x).sum()), 2 * x.cos())
    assert_close(gradient(lambda x: Batched.apply(x, 3.0).sum()), torch.full((3,), 30.0))
    assert_close(t.jit(lambda x: Product.apply(x, x), frontend=frontend)(x), x * x)


class _Reversed(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, ct):
        return -ct


class _Itself(_Reversed):
    @staticmethod
    def forward(ctx, x):
        return x


class _Turned(_Reversed):
    @staticmethod
    def forward(ctx, x):
        return x.t()[1:]

    @staticmethod
    def backward(ctx, ct):
        return torch.nn.functional.pad(-ct, (0, 0, 1, 0)).t()


@pytest.mark.parametrize("function", [_Reversed, _Itself, _Turned])
@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_a_result_that_shows_an_argument_is_a_view_of_it(function: type[Function], frontend: str) -> None:
    def both_ways(x):
        y = function.apply(x)
        x.mul_(2)
        z = y * y
        y.add_(1)
        return z, y

    compiled = t.jit(both_ways, frontend=frontend)
    x, expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert_close(compiled(x), both_ways(expected))
    assert_close(x, expected)

    def past_autograd(x):
        function.apply(x).detach().add_(1)

    for f in (past_autograd, t.jit(past_autograd, frontend=frontend)):
        x = torch.ones(2, 2).requires_grad_() * 1
        f(x)
        assert x.detach().sum() == 4 + function.apply(x.detach()).numel()

    leaf = torch.randn(2, 2, requires_grad=True)
    y = t.jit(lambda x: function.apply(x), frontend=frontend)(leaf)
    assert y.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
    (ours,) = torch.autograd.grad(y.sum(), leaf)
    assert_close(ours, torch.autograd.grad(function.apply(leaf).sum(), leaf)[0])


class _Doubled(Function):
    """As torch.func wants one."""

    @staticmethod
    def forward(x):
        return x * 2, x + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return g * x * 3 + h * y


class _Blocks(Function):
    """Gives the second argument no gradient, unless one comes to the second result."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x * 2, y * 2

    @staticmethod
    def backward(ctx, g, h):
        return g, h


@pytest.mark.parametrize("before", [lambda x: x, torch.sin], ids=["argument", "sin"])
@pytest.mark.parametrize("torch_func", [tf, t], ids=["torch", "tessera"])
def test_inside_transforms_inside_a_compiled_function(torch_func, before: Callable, x: torch.Tensor) -> None:
    def loss(x):
        return _Doubled.apply(before(x))[0].sum()

    def pulled(x):
        out, pull = torch_func.vjp(lambda x: _Doubled.apply(before(x)), x)
        return out, pull((torch.ones_like(x), torch.ones_like(x)))

    def twice(x):
        return torch_func.grad(lambda x: torch_func.grad(loss)(x).sum())(x)

    def asked(x):
        return torch_func.grad(lambda x: (x * 2 if x.requires_grad else x * 3).sum())(x)

    for f in (torch_func.grad(loss), torch_func.jacrev(loss), pulled, twice, asked):
        assert_close(t.jit(f)(x), f(x))
    assert_close(torch_func.grad(loss)(x), 3 * before(x) * tf.grad(lambda x: before(x).sum())(x))


@pytest.mark.parametrize(
    "between", [lambda y: y, torch.sin, lambda y: _Blocks.apply(torch.ones(3), y)[1]], ids=["", "sin", "blocks"]
)
def test_reached_without_a_gradient_a_function_is_given_zeros(between: Callable, x: torch.Tensor) -> None:
    def f(x):
        return _Blocks.apply(x, between(_Doubled.apply(x)[1]))[0] * 1

    def g(x, y):
        return _Blocks.apply(x, between(_Doubled.apply(y)[1]))[0] * 1

    for compiled in (f, t.jit(f, frontend="functional"), t.jit(f)):
        leaf = x.clone().requires_grad_()
        compiled(leaf).sum().backward()
        assert_close(leaf.grad, torch.ones(3))
    for compiled in (g, t.jit(g, frontend="functional"), t.jit(g)):
        leaf = x.clone().requires_grad_()
        compiled(x.clone().requires_grad_(), leaf).sum().backward()
        assert leaf.grad is not None
        assert_close(leaf.grad, torch.zeros(3))
