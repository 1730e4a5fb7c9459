"""Functions with a derivative of their own: custom_vjp, torch.autograd.Function, custom operators."""

from __future__ import annotations

import pytest
import torch
import torch.func as tf
import torch.utils.checkpoint
from torch.testing import assert_close

from tessera.frontends.functional.trace import trace_function
from tessera.func import api as t
from tessera.ir.call import in_place
from tessera.ir.verify import verify
from tessera.transforms.vjp import vjp
from tessera.util.config import override
from tessera.util.errors import InputError


class Scaled(torch.autograd.Function):
    """Its backward is wrong on purpose: that it was used shows."""

    @staticmethod
    def forward(ctx, x, k):  # noqa: ANN001, ANN205
        ctx.save_for_backward(x)
        ctx.k = k
        return x**3

    @staticmethod
    def backward(ctx, ct):  # noqa: ANN001, ANN205
        (x,) = ctx.saved_tensors
        return ct * x * ctx.k, None


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(x):  # noqa: ANN001, ANN205
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):  # noqa: ANN001, ANN205
        pass

    @staticmethod
    def backward(ctx, ct):  # noqa: ANN001, ANN205
        return ct

    @staticmethod
    def jvp(ctx, tangent):  # noqa: ANN001, ANN205
        return tangent * 5


class DoubledExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # noqa: ANN001, ANN205
        y, n = x.exp(), (x > 0)
        ctx.save_for_backward(y)
        ctx.mark_non_differentiable(n)
        return y, n

    @staticmethod
    def backward(ctx, ct, _):  # noqa: ANN001, ANN205
        (y,) = ctx.saved_tensors
        return ct * y * 2


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(0))


def test_autograd_function_uses_its_backward(x: torch.Tensor) -> None:
    with override(strict=True):
        assert_close(t.grad(lambda x: Scaled.apply(x * 2, 7.0).sum())(x), 28 * x)
        assert_close(t.vmap(t.grad(lambda a: Scaled.apply(a, 7.0)))(x), 7 * x)
        assert_close(t.grad(lambda x: t.vmap(lambda a: Scaled.apply(a, 7.0))(x).sum())(x), 7 * x)
        assert_close(t.grad(lambda x: Straight.apply(x).sum())(x), torch.ones(3))
        assert_close(t.jvp(Straight.apply, (x,), (x,)), (x.round(), 5 * x))
        assert_close(t.vmap(lambda a: t.jvp(Straight.apply, (a,), (a,))[1])(x), 5 * x)
        # no jvp of its own: the transpose of its backward
        assert_close(t.jvp(lambda x: Scaled.apply(x, 7.0), (x,), (torch.ones(3),)), (x**3, 7 * x))
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)  # nothing stays patched


def test_autograd_function_twice_is_eager_twice(x: torch.Tensor) -> None:
    leaf = x.clone().requires_grad_(True)
    (first,) = torch.autograd.grad(DoubledExp.apply(leaf)[0].sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    got = t.grad(lambda x: t.grad(lambda x: DoubledExp.apply(x)[0].sum())(x).sum())(x)
    assert_close(got, second)


def test_custom_vjp(x: torch.Tensor) -> None:
    @t.custom_vjp
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * y

    with pytest.raises(InputError, match="defvjp"):
        f(x, x)
    f.defvjp(lambda x, y: (torch.sin(x) * y, (x, y)), lambda kept, ct: (3 * ct * kept[1], ct * kept[0]))
    y, both = x.cos(), (0, 1)
    with override(strict=True):
        assert_close(f(x, y), x.sin() * y)
        assert_close(t.grad(lambda x, y: f(x, y=y).sum(), both)(x, y), (3 * y, x))
        assert_close(t.vmap(t.grad(f, both))(x, y), (3 * y, x))
        assert_close(t.grad(lambda x, y: t.vmap(f)(x, y).sum(), both)(x, y), (3 * y, x))
        shared = t.grad(lambda x, y: t.vmap(f, (0, None))(x, y).sum(), both)(x, torch.tensor(2.0))
        assert_close(shared, (torch.full((3,), 6.0), x.sum()))
        assert_close(t.jvp(f, (x, y), (x, y)), (x.sin() * y, 3 * y * x + x * y))
        assert_close(t.grad(lambda y: t.grad(lambda x: f(x, y).sum())(x).sum())(y), torch.full((3,), 3.0))
    leaves = x.clone().requires_grad_(True), y.clone().requires_grad_(True)
    assert_close(torch.autograd.grad(f(*leaves).sum(), leaves), (3 * y, x))
    assert_close(tf.grad(lambda x: f(x, y).sum())(x), 3 * y)


def test_custom_vjp_closes_over_an_outer_variable(x: torch.Tensor) -> None:
    def outer(w: torch.Tensor) -> torch.Tensor:
        @t.custom_vjp
        def f(x: torch.Tensor) -> torch.Tensor:
            return x * w

        f.defvjp(lambda x: (x * w, None), lambda _, ct: (ct * w * 10,))
        return t.grad(lambda x: f(x).sum())(x).sum()

    assert_close(t.grad(outer)(torch.tensor(2.0)), torch.tensor(30.0))


def test_a_wrong_rule_is_named(x: torch.Tensor) -> None:
    @t.custom_vjp
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    f.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct.sum(),))
    with pytest.raises(InputError, match=r"shape \(3,\), got \(\)"):
        t.grad(lambda x: f(x).sum())(x)


def test_custom_operators_with_registered_autograd(x: torch.Tensor) -> None:
    @torch.library.custom_op("tessera_tests::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    triple.register_fake(torch.empty_like)
    triple.register_autograd(lambda ctx, ct: ct * 30)
    with override(strict=True):
        assert_close(t.grad(lambda x: triple(x.sin()).sum())(x), 30 * x.cos())
        assert_close(t.vmap(t.grad(lambda x: triple(x)))(x), torch.full((3,), 30.0))


def test_checkpoint_is_one_equation(x: torch.Tensor) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    traced = trace_function(lambda x: t.checkpoint(body)(x) * 2, (x,))
    assert [e.op.name for e in traced.trace.equations[:1]] == ["checkpoint"] and len(traced.trace.equations) == 2
    tagged = ["recompute 1" in e.tags for e in in_place(traced.trace).equations]
    assert tagged == [True] * (len(tagged) - 1) + [False]
    assert_close(t.grad(t.checkpoint(body))(x), tf.grad(body)(x))
    leaf = x.clone().requires_grad_(True)
    assert_close(torch.autograd.grad(t.checkpoint(body)(leaf), leaf)[0], tf.grad(body)(x))
    plain = t.grad(lambda x: torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False))(x)
    assert_close(plain, tf.grad(body)(x))


def test_the_equation_verifies(x: torch.Tensor) -> None:
    traced = trace_function(lambda x: Scaled.apply(x, 2.0).sum(), (x,))
    verify(traced.trace)
    verify(vjp(traced.trace, list(traced.trace.inputs), traced.mode).trace)
