"""Gradients of gradients through compiled graphs, of any order, against eager PyTorch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.pipeline import compilation as pipelines
from tessera.store.program import COUNTS
from tessera.util.errors import DoubleBackwardError

PLAIN = ("sdpa", "aten")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def mlp(x, w, v):  # noqa: ANN001, ANN201
    return torch.tanh(torch.tanh(x @ w) @ v)


def inner_write(x):  # noqa: ANN001, ANN201
    y = x * 2
    y[:, 1:].mul_(x[:, 1:].sin())
    return y.exp()


def batch_norm_eval(x, w, b):  # noqa: ANN001, ANN201
    return F.batch_norm(x, x.new_full((3,), 0.3), x.new_full((3,), 1.7), w, b).tanh()


def attention(q, k, v):  # noqa: ANN001, ANN201
    return ((q @ k.mT).div(2).softmax(-1) @ v).tanh()


def views(x):  # noqa: ANN001, ANN201
    a, b = x.t().chunk(2)
    return torch.stack([a.flatten() * b.reshape(-1), b.flatten().cos()]).expand(2, 2, -1)


def masked(x):  # noqa: ANN001, ANN201
    return torch.where(x > 0, x.sin(), x * x * x).cumsum(1)


def held(x):  # noqa: ANN001, ANN201
    with torch.no_grad():
        scale = x.norm() + 1
    return (x / scale) ** 3 + x.detach() * x.square()


def indexed(table):  # noqa: ANN001, ANN201
    return F.embedding(torch.tensor([0, 2, 2, 1]), table).tanh() ** 2


def under_checkpoint(x, w):  # noqa: ANN001, ANN201
    return checkpoint(lambda a, b: (a @ b).sigmoid() * a, x, w, use_reentrant=False).exp()


# name -> the function, shapes of its arguments
FUNCTIONS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    "mlp": (mlp, ((4, 3), (3, 3), (3, 2))),
    "linear and bias": (lambda x, w, b: F.linear(x, w, b).sigmoid(), ((4, 3), (2, 3), (2,))),
    "exp": (lambda x: x.exp(), ((3, 4),)),
    "polynomial": (lambda x: x**3 + 2 * x, ((5,),)),
    "product": (lambda x, y: x * y * x, ((3,), (2, 3))),
    "division": (lambda x, y: x / (y * y + 1), ((3,), (3,))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b).tanh(), ((3, 4), (4,), (4,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w).tanh(), ((3, 4), (4,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b).tanh(), ((2, 4, 3), (4,), (4,))),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True).tanh(), ((4, 3), (3,), (3,))),
    "batch_norm eval": (batch_norm_eval, ((4, 3), (3,), (3,))),
    "attention": (attention, ((2, 3, 4), (2, 3, 4), (2, 3, 4))),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1).tanh(), ((1, 2, 4, 4), (2, 2, 3, 3))),
    "conv_transpose": (lambda x, w: F.conv_transpose2d(x, w, stride=2).sin(), ((1, 2, 3, 3), (2, 2, 2, 2))),
    "softmax": (lambda x: x.softmax(-1) ** 2, ((3, 4),)),
    "log_softmax": (lambda x: x.log_softmax(-1) * x, ((3, 4),)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 3]), label_smoothing=0.1), ((3, 4),)),
    "mse": (lambda x, y: F.mse_loss(x.tanh(), y.tanh()), ((3, 4), (3, 4))),
    "gelu": (lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"), ((3, 4),)),
    "silu": (lambda x: F.silu(x) * F.softplus(x), ((3, 4),)),
    "relu": (lambda x: F.relu(x) * F.leaky_relu(x) * F.elu(x), ((3, 4),)),
    "embedding": (indexed, ((3, 4),)),
    "written inside": (inner_write, ((3, 4),)),
    "checkpoint": (under_checkpoint, ((3, 3), (3, 3))),
    "views": (views, ((4, 4),)),
    "where": (masked, ((3, 4),)),
    "no_grad and detach": (held, ((3, 4),)),
    "norm": (lambda x: x.norm(dim=1) * x.pow(2).sum(1).sqrt(), ((3, 4),)),
    "logsumexp": (lambda x: x.logsumexp(-1) * x.amax(-1), ((3, 4),)),
    "products of elements": (lambda x: x.prod(-1) * x.cumprod(-1).sum(-1), ((3, 4),)),
    "gather": (lambda x: x.gather(1, torch.tensor([[0, 2], [1, 1], [3, 0]])).exp(), ((3, 4),)),
    "max_pool": (lambda x: F.max_pool2d(x, 2).tanh(), ((1, 2, 4, 4),)),
    "avg_pool": (lambda x: F.avg_pool2d(x.sin(), 2), ((1, 2, 4, 4),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").tanh(), ((1, 2, 3, 3),)),
    "matrix inverse": (lambda x: torch.linalg.inv(x @ x.mT + 3 * torch.eye(3, dtype=x.dtype)), ((3, 3),)),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ki", x, y).sin(), ((3, 4), (4, 2))),
    "complex": (lambda x: torch.fft.rfft(x).abs().square().log1p(), ((3, 4),)),
    "linear only": (lambda x, y: 2 * x + y.sum(), ((3, 4), (3,))),
    "several results": (lambda x, y: (x * y, (x + y).sin(), x.max()), ((3, 4), (3, 4))),
}


def results_of(out: object) -> list[torch.Tensor]:
    return list(out) if isinstance(out, tuple) else [out]  # type: ignore[list-item]


def scalar(out: object) -> torch.Tensor:
    """One number of all results, whose elements count differently."""
    return sum((y * torch.arange(1, y.numel() + 1).view(y.shape) / y.numel()).sum() for y in results_of(out))  # type: ignore[return-value]


def orders(f: Callable, shapes: tuple, count: int, leaves: bool = True) -> list[torch.Tensor | None]:
    """Derivatives of one order after the other, each of a number made of those before."""
    args = [draw(*s).requires_grad_() for s in shapes]
    y = scalar(f(*(args if leaves else [a * 1.0 for a in args])))
    found: list[torch.Tensor | None] = []
    for left in reversed(range(count)):
        grads = torch.autograd.grad(y, args, create_graph=left > 0, allow_unused=True)
        found += grads
        some = [g for g in grads if g is not None and g.requires_grad]
        if not some:
            break
        y = scalar(tuple(g.square() for g in some))
    return found


def assert_same(got: list, want: list) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        if w is None or g is None:  # zeros and nothing mean the same where a derivative ends
            assert all(x is None or not x.any() for x in (g, w))
        else:
            torch.testing.assert_close(g, w, rtol=1e-7, atol=1e-9)


def normalised(x, dim, w, b):  # noqa: ANN001, ANN201
    x = x - x.mean(dim, keepdim=True)
    return (x * (x.square().mean(dim, keepdim=True) + 1e-5).rsqrt() * w + b).tanh()


# Eager's third derivatives of these hold the statistics still, and are wrong; so the arithmetic stands for them.
WRITTEN_OUT: dict[str, Callable] = {
    "layer_norm": lambda x, w, b: normalised(x, -1, w, b),
    "batch_norm": lambda x, w, b: normalised(x, 0, w, b),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_three_orders(name: str) -> None:
    f, shapes = FUNCTIONS[name]
    fast = tessera.jit(f, frontend="functional", strict=True, executors=PLAIN)
    assert_same(orders(fast, shapes, 3), orders(WRITTEN_OUT.get(name, f), shapes, 3))


# What these save are results; their inputs are gone when a gradient is differentiated.
SAVE_RESULTS = ("exp", "linear and bias", "softmax", "relu", "views", "cross_entropy", "embedding", "written inside")


@pytest.mark.parametrize("name", SAVE_RESULTS)
def test_three_orders_of_inputs_that_nobody_holds(name: str) -> None:
    f, shapes = FUNCTIONS[name]
    assert_same(orders(tessera.jit(f, strict=True), shapes, 3, leaves=False), orders(f, shapes, 3, leaves=False))


def check(program: Callable, **options: object) -> None:
    """The same numbers with a compiled function as with a plain one; `program` is given what compiles."""

    def run(compiled: Callable) -> list:
        torch.manual_seed(0)
        return [x.detach() if isinstance(x, torch.Tensor) else x for x in tree_leaves(program(compiled))]

    want, got = run(lambda f: f), run(lambda f: tessera.jit(f, strict=True, **{"executors": PLAIN, **options}))
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        if isinstance(w, torch.Tensor):
            torch.testing.assert_close(g, w, rtol=1e-7, atol=1e-9)
        else:
            assert g == w


W = draw(4, 4)


def vector(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(W @ x).exp()


def number(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(W @ x).square().sum()


def test_torch_autograd_functional() -> None:
    def program(compiled: Callable) -> list:
        f, g, x, v = compiled(number), compiled(vector), draw(4), draw(4) + 1
        return [
            functional.hessian(f, x), functional.hessian(f, x, vectorize=True), functional.hvp(f, x, v),
            functional.vhp(f, x, v), functional.jvp(g, x, v), functional.vjp(g, x, v),
            functional.jacobian(g, x, vectorize=True), functional.jacobian(g, x.requires_grad_(), create_graph=True),
            functional.jacobian(g, x.detach(), vectorize=True, strategy="forward-mode"),
        ]  # fmt: skip

    check(program)


def test_gradcheck_and_gradgradcheck() -> None:
    x = draw(4).requires_grad_()
    assert torch.autograd.gradcheck(tessera.jit(vector, strict=True), (x,), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(tessera.jit(vector, strict=True), (x,), check_batched_grad=True)


@pytest.mark.parametrize("executors", [PLAIN, None], ids=["plain", "tile"])
def test_batched_cotangents_are_differentiated_again(executors: tuple | None) -> None:
    def program(compiled: Callable) -> tuple:
        x = draw(4).requires_grad_()
        (rows,) = torch.autograd.grad(
            compiled(vector)(x), x, torch.eye(4, dtype=x.dtype), is_grads_batched=True, create_graph=True
        )
        return rows, torch.autograd.grad(rows.square().sum(), x)

    check(program, executors=executors)


def penalised(critic: Callable, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """WGAN-GP's loss."""
    mixed = (0.3 * real + 0.7 * fake).requires_grad_()
    (g,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return critic(fake).mean() - critic(real).mean() + (g.flatten(1).norm(dim=1) - 1).square().mean()


def test_gradient_penalty_in_training() -> None:
    def program(compiled: Callable) -> list:
        net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(12, 1)).double()
        critic, optimizer = compiled(net), torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):  # the optimizer writes the parameters in place between
            optimizer.zero_grad()
            penalised(critic, draw(2, 2, 4, 4), draw(2, 2, 4, 4).sin()).backward()
            optimizer.step()
        return list(net.parameters())

    check(program)


def test_several_inner_steps_of_maml() -> None:
    def net(x, w, b, v):  # noqa: ANN001, ANN202
        return F.linear(torch.tanh(F.linear(x, w, b)), v).square().mean()

    def program(compiled: Callable) -> list:
        fast, first = compiled(net), [draw(*s).requires_grad_() for s in ((5, 2), (5,), (1, 5))]
        now = first
        for _ in range(3):
            grads = torch.autograd.grad(fast(draw(6, 2), *now), now, create_graph=True)
            now = [p - 0.1 * g for p, g in zip(now, grads, strict=True)]
        return list(torch.autograd.grad(fast(draw(6, 2), *now), first))

    check(program)


def test_residual_of_a_differential_equation() -> None:
    def program(compiled: Callable) -> list:
        net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        x = draw(5, 2).requires_grad_()
        u = compiled(net)(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
        (dddu,) = torch.autograd.grad(ddu[:, 0].sum(), x, create_graph=True)
        (u[:, 0] * du[:, 0] + ddu[:, 1] + dddu[:, 0]).square().mean().backward()
        return [p.grad for p in net.parameters()]

    check(program)


@pytest.mark.parametrize("random", ["auto", "on"])
def test_the_second_derivative_sees_the_same_random_numbers(random: str) -> None:
    """Checked against the numbers themselves, since those of fused kernels are not eager's."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = F.dropout(torch.ones_like(x), 0.5)
        noise = torch.randn_like(x)
        return (x * mask * noise).sin(), mask * noise

    with tessera.override(fused_random=random) if random == "on" else nullcontext():
        x = draw(40).requires_grad_()
        y, k = tessera.jit(f, strict=True)(x * 1.0)
        state = torch.get_rng_state()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
    k = k.detach()
    torch.testing.assert_close(g, (x * k).cos() * k)
    torch.testing.assert_close(h, -(x * k).sin() * k * k)
    assert torch.equal(state, torch.get_rng_state())  # nothing was drawn


def test_dropout_does_not_read_its_argument() -> None:
    """So its gradient depends on the random numbers alone, and these are kept."""
    x = draw(3, 4).requires_grad_() * 1.0
    (g,) = torch.autograd.grad(tessera.jit(lambda x: F.dropout(x, 0.5) * 2, strict=True)(x).sum(), x, create_graph=True)
    assert not g.requires_grad
    assert set(g.unique().tolist()) <= {0.0, 4.0}


def test_inputs_that_are_written() -> None:
    def f(x, y):  # noqa: ANN001, ANN202
        x.mul_(y.sin())
        return x.exp(), x * y

    def program(compiled: Callable) -> list:
        a, b = draw(3).requires_grad_(), draw(3, 1).requires_grad_()
        x = a.expand(3, 3) * 1.5
        u, v = compiled(f)(x, b)
        first = torch.autograd.grad((u + v * x).sum(), (a, b), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (a, b))]

    check(program)


def test_results_that_alias_inputs() -> None:
    def program(compiled: Callable) -> list:
        a = draw(2, 3).requires_grad_()
        out = compiled(lambda x: (x, x.view(-1), x * x.sum(), x[0]))(a * 2)
        (g,) = torch.autograd.grad(sum((t * t).sum() for t in out), a, create_graph=True)
        return [g, *torch.autograd.grad(g.exp().sum(), a)]

    check(program)


def test_buffers_of_a_norm_are_written_once() -> None:
    def program(compiled: Callable) -> list:
        net, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double(), draw(5, 3).requires_grad_()
        (g,) = torch.autograd.grad(compiled(net)(x).sum(), x, create_graph=True)
        g.square().sum().backward()
        return [x.grad, *(p.grad for p in net.parameters()), *net.buffers()]

    check(program)


def test_changing_sizes() -> None:
    def program(compiled: Callable) -> list:
        fast, w, found = compiled(lambda x, w: torch.tanh(x @ w).softmax(0).exp()), draw(3, 3).requires_grad_(), []
        for n in (4, 5, 7, 9):
            x = draw(n, 3).requires_grad_()
            (g,) = torch.autograd.grad(fast(x * 1, w).square().sum(), x, create_graph=True)
            found += [g, *torch.autograd.grad(g.square().sum(), (x, w))]
        return found

    check(program)


def test_which_gradients_there_are() -> None:
    def program(compiled: Callable) -> list:
        x, y = draw(3).requires_grad_(), draw(3).requires_grad_()
        linear, g = compiled(lambda x, y: 2 * x + y), compiled(lambda x, y: (x * y).sin())
        (first,) = torch.autograd.grad(linear(x, y).sum(), x, create_graph=True)
        z = g(x, y).sum()
        (second,) = torch.autograd.grad(z, x, create_graph=True)
        mixed = torch.autograd.grad(second.sum(), (x, y), retain_graph=True)
        z.backward(inputs=[y], create_graph=True)
        y.grad.sum().backward(inputs=[x])
        return [first.requires_grad, second.requires_grad, *mixed, y.grad.requires_grad, x.grad]

    check(program)


def test_saved_tensors_that_were_written_are_refused() -> None:
    x = draw(3).requires_grad_()
    y = x * 1
    out = tessera.jit(lambda y: y.sin(), strict=True)(y)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_a_graph_that_is_gone_is_refused() -> None:
    x = draw(3).requires_grad_()
    out = tessera.jit(lambda x: x.sin(), strict=True)(x).sum()
    (g,) = torch.autograd.grad(out, x, create_graph=True, retain_graph=False)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], -x.sin())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, x)


def test_what_saves_nothing_runs_twice() -> None:
    x = draw(3).requires_grad_()
    out = tessera.jit(lambda x: x + 1, strict=True)(x).sum()
    out.backward()
    out.backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_nothing_is_compiled_before_it_is_asked_for() -> None:
    seen: list = []
    pipelines.WATCHERS.append(seen.append)
    try:
        x = draw(3).requires_grad_()
        fast = tessera.jit(lambda x: x.sin(), strict=True)
        fast(x).sum().backward()
        assert len(seen) == 1
        for _ in range(3):
            torch.autograd.grad(fast(x).sum(), x, create_graph=True)
        assert [c.name.endswith("_again") for c in seen] == [False, True]
    finally:
        pipelines.WATCHERS.remove(seen.append)


def test_an_input_that_nothing_saves_is_not_held() -> None:
    fast = tessera.jit(lambda x: x.exp(), strict=True, executors=PLAIN)
    x = draw(3).requires_grad_()
    fast(x * 1)
    y = x * 1
    held = weakref.ref(y)
    out = fast(y)
    del y
    assert held() is None
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], x.exp())


def test_a_program_from_the_disk_is_differentiated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grads() -> list[torch.Tensor]:
        x = draw(3, 4).requires_grad_()
        fast = tessera.jit(lambda x: x.softmax(-1) ** 2, strict=True, frontend="functional")
        (g,) = torch.autograd.grad(scalar(fast(x)), x, create_graph=True)
        return [g.detach(), *torch.autograd.grad(scalar(g), x)]

    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    with tessera.override(program_cache=True):
        loaded = COUNTS["loaded"]
        want, got = grads(), grads()
        assert COUNTS["loaded"] == loaded + 1
    assert_same(got, want)


def test_penalty_inside_a_training_step() -> None:
    def losses(step: Callable, net: nn.Module) -> list[float]:
        return [float(step(draw(4, 3), draw(4, 1))) for _ in range(3)]

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + g.square().mean()

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    plain, model = net(), net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def eager(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(plain, *batch)
        loss.backward()
        optimizer.step()
        return loss

    step = tessera.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.testing.assert_close(losses(step, model), losses(eager, plain))


def test_the_norm_of_zeros() -> None:
    """Eager's second derivative by the zeros is NaN; that by the cotangent is zero."""

    def seconds(f: Callable) -> list[torch.Tensor]:
        x, ct = torch.zeros(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)
        (g,) = torch.autograd.grad(f(x), x, ct, create_graph=True)
        return [g, *torch.autograd.grad(g.sum(), (x, ct))]

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.norm(dim=1)

    torch.testing.assert_close(seconds(tessera.jit(f, strict=True)), seconds(f), equal_nan=True)


def test_sizes_that_nothing_uses_are_not_read() -> None:
    """`x` is lost when the inner gradient is differentiated again, and its size with it."""

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (inner,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
        return inner, x**6

    compiled = tessera.jit(f)
    for n in (3, 4, 5):
        seen = []
        for g in (compiled, f):
            x = torch.linspace(1, 2, n, requires_grad=True)
            y = torch.linspace(1, 2, 2 * n).view(n, 2).requires_grad_() * 1
            first = torch.autograd.grad(sum(o.sin().sum() for o in g(x, y)), [x, y], create_graph=True)
            sum(o.sin().sum() for o in first).backward()
            seen.append((first, x.grad))
        torch.testing.assert_close(*seen)


@pytest.mark.parametrize(
    "read", [lambda x: x.prod(-1), lambda x: x.prod(-2)[torch.tensor([0, 1])], lambda x: x.sin() * x]
)
def test_contents_that_the_graph_wrote_over_are_not_taken_for_what_they_were(read: Callable) -> None:
    """They are saved, or refused: never written over a second time."""

    def f(x: torch.Tensor) -> torch.Tensor:
        x.view(-1).view(-1, 1).data.add_(0.25)
        return read(x)

    expected = None
    for g in (f, tessera.jit(f)):
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
        out = g(x)
        try:
            (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        except DoubleBackwardError as error:
            assert g is not f and "'x'" in str(error) and "the graph writes it" in str(error)
            return
        first.sum().backward()
        expected = expected or (first, x.grad)
        torch.testing.assert_close((first, x.grad), expected)


def test_inputs_that_are_gone_have_no_edge() -> None:
    """The statistics of `norm`, which nothing reads, are lost when the gradient is differentiated again."""
    norm, layer = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)

    def f(x: torch.Tensor) -> torch.Tensor:
        norm(x)
        return layer(x) * 2

    seen = []
    for g in (f, tessera.jit(f)):
        layer.zero_grad()
        x = torch.arange(6.0).view(2, 3).requires_grad_() * 1
        (first,) = torch.autograd.grad(g(x).square().sum(), x, create_graph=True)
        first.sum().backward()
        seen.append((first, layer.weight.grad, layer.bias.grad))
    torch.testing.assert_close(seen[1], seen[0])
