"""cond, while_loop and scan: eager meaning, derivatives, batching, PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.func as tf
from torch import cond as torch_cond
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan as torch_scan
from torch._higher_order_ops.while_loop import while_loop as torch_while_loop
from torch.testing import assert_close

import tessera
from tessera.frontends.functional.trace import trace_function
from tessera.func import api as t
from tessera.ir.interp import run
from tessera.ir.printer import compile_trace
from tessera.ir.verify import verify
from tessera.transforms.vjp import vjp
from tessera.util.config import override
from tessera.util.errors import InputError

W = torch.linspace(-1, 1, 4)


@pytest.fixture(autouse=True)
def strict():  # noqa: ANN201
    with override(strict=True):
        yield


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(0))


def choose(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return t.cond(p, lambda x: x.sin() * W, lambda x: x * 2, (x,)).sum()


@pytest.mark.parametrize("p", [torch.tensor(True), torch.tensor(False)])
def test_cond(p: torch.Tensor, x: torch.Tensor) -> None:
    assert_close(t.grad(choose, 1)(p, x), x.cos() * W if p else torch.full((4,), 2.0))
    assert_close(t.jvp(lambda x: choose(p, x), (x,), (x,))[1], (x.cos() * W * x).sum() if p else 2 * x.sum())
    assert_close(t.hessian(lambda x: choose(p, x))(x), torch.diag(-x.sin() * W) if p else torch.zeros(4, 4))
    traced = trace_function(choose, (p, x))
    joint = verify(vjp(traced.trace, [traced.trace.inputs[1]], traced.mode).trace)
    for outs in (run(joint, p, x, torch.ones(())), compile_trace(joint)(p, x, torch.ones(()))):
        assert_close(outs[1], t.grad(choose, 1)(p, x))


def test_cond_batched(x: torch.Tensor) -> None:
    p, rows = torch.tensor([True, False, True]), torch.stack([x, x.cos(), x.exp()])
    each = [choose(p[i], rows[i]) for i in range(3)]
    grads = torch.stack([t.grad(choose, 1)(p[i], rows[i]) for i in range(3)])
    assert_close(t.vmap(choose)(p, rows), torch.stack(each))
    assert_close(t.vmap(choose, (None, 0))(p[1], rows), 2 * rows.sum(1))
    assert_close(t.vmap(t.grad(choose, 1))(p, rows), grads)
    assert_close(t.grad(lambda r: t.vmap(choose)(p, r).sum())(rows), grads)


def test_cond_closes_over_outer_variables(x: torch.Tensor) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return t.cond(a > 0, lambda x: (x * a).sum(), lambda x: (x - a).sum(), (x,))

    assert_close(t.grad(f)(torch.tensor(2.0)), x.sum())
    assert_close(t.grad(f)(torch.tensor(-2.0)), torch.tensor(-4.0))


def test_cond_errors(x: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"same types, got f32\[\] and f32\[4\]"):
        t.grad(lambda x: t.cond(x.sum() > 0, lambda x: x, lambda x: x.sum(), (x,)).sum())(x)


A = torch.randn(4, 4, generator=torch.Generator().manual_seed(5)) * 0.3


def step(h: torch.Tensor, x: torch.Tensor) -> tuple:
    return (A @ h + x).tanh(), (A @ h).sum()


def unrolled(h: torch.Tensor, xs: torch.Tensor, reverse: bool = False) -> tuple:
    ys = []
    for row in reversed(xs.unbind()) if reverse else xs.unbind():
        h, y = step(h, row)
        ys.append(y)
    return h, torch.stack(ys[::-1] if reverse else ys)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(x: torch.Tensor, reverse: bool) -> None:
    xs = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))

    def loss(how: object) -> object:
        def f(h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
            last, ys = how(h, xs)  # type: ignore[operator]
            return (last**2).sum() + ys.sin().sum()

        return f

    ours = loss(lambda h, xs: t.scan(step, h, xs, reverse=reverse))
    plain = loss(lambda h, xs: unrolled(h, xs, reverse))
    both = (0, 1)
    assert_close(ours(x, xs), plain(x, xs))
    assert_close(t.grad(ours, both)(x, xs), tf.grad(plain, both)(x, xs))
    assert_close(t.jvp(ours, (x, xs), (x, xs)), tf.jvp(plain, (x, xs), (x, xs)))
    hs, many = torch.stack([x, x + 1, x * 2]), torch.stack([xs, xs + 1, xs * 2])
    assert_close(t.vmap(t.grad(ours, both))(hs, many), tf.vmap(tf.grad(plain, both))(hs, many))
    assert_close(t.vmap(ours, (None, 0))(x, many), tf.vmap(plain, (None, 0))(x, many))
    assert_close(t.hessian(ours)(x, xs), tf.hessian(plain)(x, xs), rtol=1e-4, atol=1e-4)


def test_scan_by_what_it_closes_over(x: torch.Tensor) -> None:
    xs = torch.randn(3, 4)

    def ours(a: torch.Tensor) -> torch.Tensor:
        return t.scan(lambda h, row: ((a @ h + row).tanh(), h * 2), x, xs)[1].sum()

    def plain(a: torch.Tensor) -> torch.Tensor:
        h, total = x, torch.zeros(())
        for row in xs:
            total = total + (h * 2).sum()
            h = (a @ h + row).tanh()
        return total

    assert_close(t.grad(ours)(A), tf.grad(plain)(A))


def double(x: torch.Tensor) -> torch.Tensor:
    loop = t.while_loop(lambda i, x: (i < 5) & (x.sum() < 100), lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))
    return loop[1]


def test_while_loop(x: torch.Tensor) -> None:
    assert_close(double(x), x * 32)
    assert_close(t.jvp(double, (x,), (x + 1,)), (x * 32, (x + 1) * 32))
    rows = torch.tensor([[1.0], [10.0], [30.0]]).expand(3, 4)
    assert_close(t.vmap(double)(rows), torch.stack([double(r) for r in rows]))
    with pytest.raises(InputError, match="tuple"):
        t.while_loop(lambda x: x.sum() < 10, lambda x: x + 1, (torch.zeros(3),))


@pytest.mark.parametrize("positive", [True, False])
def test_torchs_own_operators_inside_a_transform(x: torch.Tensor, positive: bool) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return torch.cond(a.sum() > 0, lambda a: a.sin(), lambda a: a * 2, (a,)).sum()

    a = x.abs() if positive else -x.abs()
    assert_close(t.grad(f)(a), a.cos() if positive else torch.full((4,), 2.0))


def by_name(name: str) -> tuple[Callable, Callable]:
    """A function that calls one of PyTorch's own operators by a name of its own, and the same in plain operators."""
    if name == "cond":
        return (
            lambda x: torch_cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 2, (x,)).sum(),
            lambda x: torch.where(x.sum() > 0, x.sin(), x * 2).sum(),
        )
    if name == "scan":
        return (
            lambda x: torch_scan(lambda c, row: (c * row, (c + row).sin()), x[0], x)[1].sum(),
            lambda x: sum((x[:i].prod() * x[0] + x[i]).sin() for i in range(4)),
        )
    if name == "map":
        return lambda x: torch_map(lambda row: {"a": row.sin() * 2}, x)["a"].sum(), lambda x: (x.sin() * 2).sum()
    return (
        lambda x: torch_while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y.sin()), (torch.tensor(0), x))[1].sum(),
        lambda x: x.sin().sin().sin().sum(),
    )


@pytest.mark.parametrize("name", ["cond", "scan", "map", "while_loop"])
def test_torchs_own_operators_by_another_name(name: str, x: torch.Tensor) -> None:
    """`from torch import cond`: nothing can be put in the place of a name that the user's module holds."""
    f, want = by_name(name)
    rows = torch.stack([x, -x])
    assert_close(t.jvp(f, (x,), (x + 1,)), torch.func.jvp(want, (x,), (x + 1,)))
    assert_close(t.vmap(f)(rows), torch.stack([want(row) for row in rows]))
    if name != "while_loop":
        assert_close(t.grad(f)(x), torch.func.grad(want)(x))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_functions_inside_a_transform(fullgraph: bool, x: torch.Tensor) -> None:
    """What `torch.compile` gave runs as it is while it is traced, and is compiled afterwards as before."""
    compiled = torch.compile(lambda x: x.sin() * 2, backend="eager", fullgraph=fullgraph)
    assert_close(t.grad(lambda x: compiled(x).sum())(x), 2 * x.cos())
    assert_close(t.vmap(compiled)(torch.stack([x, x + 1])), torch.stack([x.sin() * 2, (x + 1).sin() * 2]))
    assert_close(t.jvp(compiled, (x,), (x + 1,)), (x.sin() * 2, 2 * x.cos() * (x + 1)))
    assert_close(compiled(x), x.sin() * 2)


@pytest.mark.parametrize("name", ["cond", "scan", "while_loop"])
def test_under_torch_dynamo(name: str, x: torch.Tensor) -> None:
    f = {
        "cond": lambda x: t.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 2, (x,)).sum(),
        "scan": lambda x: t.scan(lambda c, x: (c * x, c + x), torch.ones(()), x)[1].sum(),
        "while_loop": lambda x: (
            t.while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (x.detach(),))[0].sum() + x.sum()
        ),
    }[name]
    torch._dynamo.reset()
    for sign in (1, -1):
        a = (x.abs() * sign).requires_grad_(True)
        out, want = tessera.jit(f)(a), f(a)
        assert_close(out, want)
        assert_close(torch.autograd.grad(out, a), torch.autograd.grad(want, a))


@pytest.mark.parametrize("rows", [1, 3])
def test_torchs_map(rows: int) -> None:
    from torch._higher_order_ops.map import map as torch_map

    w = torch.randn(4, requires_grad=True)
    x = torch.randn(rows, 4, requires_grad=True)

    def mapped(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch_map(lambda row, w: (row["a"].sin() * w, row["b"].sum()), {"a": x, "b": x * 2}, w)

    def observed(f):  # noqa: ANN001, ANN202
        out = f(x, w)
        return [*out, *torch.autograd.grad(out[0].sum() + out[1].square().sum(), (x, w))]

    torch._dynamo.reset()
    assert_close(observed(tessera.jit(mapped)), observed(mapped))


def test_a_loop_closes_over_the_tensor_that_it_begins_with() -> None:
    """What is closed over stays as it is, while the carry that began as the same tensor moves on."""

    def root(x: torch.Tensor) -> torch.Tensor:
        return tessera.while_loop(lambda y, n: n < 6, lambda y, n: ((y + x / y) / 2, n + 1), (x, torch.tensor(0)))[0]

    def steps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tessera.scan(lambda y, row: (y + x[0], row * x.sum()), x[0], x)

    x = torch.tensor([[2.0, 3.0], [5.0, 7.0]])
    assert_close(tessera.jit(root)(x), root(x))
    assert_close(root(x), x.sqrt())
    assert_close(tessera.jit(steps)(x), steps(x))

    def same(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tessera.scan(lambda y, row: (y + x, row * 2), x, x.repeat(2, 1, 1))

    assert_close(tessera.jit(same)(x), same(x))
