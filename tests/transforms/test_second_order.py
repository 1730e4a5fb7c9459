"""Second derivatives: every mix of forward and reverse mode, against finite differences of eager's gradient.

A rule may read results that an operator gives beside its own (statistics, factors, norms). Where those carry no
derivative, a second derivative by one mix of modes is wrong and by another right; so all four are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tessera
from tessera.util.config import override

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
from samples import TABLE, Sample  # noqa: E402

from tessera.ops.op import registry  # noqa: E402

Tensors = tuple[torch.Tensor, ...]
_draw = torch.Generator().manual_seed(3)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_draw, dtype=torch.float64)


W, B, MEAN, VAR = f(4), f(4), f(4), f(4).abs() + 0.5
TALL = torch.eye(3, dtype=torch.float64)
HOLES = torch.tensor([[1, 0, 1, 1], [1, 0, 2, 0], [0, 1, 1, 3]], dtype=torch.float64)  # rows with one zero and with two
MASKED = torch.zeros(3, 4, dtype=torch.float64)
MASKED[0, 1] = MASKED[1] = MASKED[2, 3] = -torch.inf  # nothing is left of the second row

# Operators with auxiliary results, and others whose formulas PyTorch keeps in C++: functions of a 3x4 matrix.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (4,), W, B),
    "layer_norm_weight": lambda x: F.layer_norm(W.repeat(2, 1), (4,), x[0], x[1]),
    "rms_norm": lambda x: F.rms_norm(x, (4,), x[0]),
    "group_norm": lambda x: F.group_norm(x.reshape(1, 4, 3), 2, x[0], x[1]),
    "batch_norm": lambda x: F.batch_norm(x.reshape(1, 4, 3), None, None, x[0], x[1], True),
    "batch_norm_running": lambda x: F.batch_norm(x, MEAN.clone(), VAR.clone(), W, B, True),
    "batch_norm_eval": lambda x: F.batch_norm(x, MEAN, VAR, x[0], B, False),
    "instance_norm": lambda x: F.instance_norm(x.reshape(1, 4, 3), weight=x[0], bias=x[1]),
    "weight_norm": lambda x: torch._weight_norm(x, x[:, :1] ** 2 + 1, 0),
    "cosine_similarity": lambda x: F.cosine_similarity(x, W, dim=1),
    "glu": F.glu,
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "det": lambda x: torch.linalg.det(x[:, :3] + TALL),
    "slogdet": lambda x: torch.linalg.slogdet(x[:, :3])[1],
    "solve": lambda x: torch.linalg.solve(x[:, :3] + 3 * TALL, x[:, 3:]),
    "lu_factor": lambda x: torch.linalg.lu_factor(x[:, :3])[0],
    "qr": lambda x: torch.linalg.qr(x.T)[1],
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x[:, :3] + x[:, :3].T),
    "eigh": lambda x: torch.linalg.eigh(x[:, :3] + x[:, :3].T)[1] ** 2,
    "eig": lambda x: torch.linalg.eig(x[:, :3])[1].abs(),
    "safe_softmax": lambda x: torch._safe_softmax(x + MASKED, -1),
    "attention_masked": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], MASKED[:, :3] == 0),
    "cumprod": lambda x: (x * HOLES).cumprod(1),
    "cumprod_down": lambda x: (x * HOLES).cumprod(0),
    "prod": lambda x: (x * HOLES).prod(1),
}


def loss_of(outputs: Callable[..., list[torch.Tensor]]) -> Callable[..., torch.Tensor]:
    """A scalar that is not linear in the outputs."""
    return lambda *xs: sum(
        ((o + 0.3 * o * o) * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in outputs(*xs)
    )  # type: ignore[return-value]  # noqa: E501


def eager_gradient(loss: Callable, xs: Tensors) -> Tensors:
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    grads = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, xs, strict=True))


def along(loss: Callable, xs: Tensors, ts: Tensors, step: float = 1e-5) -> Tensors:
    """How eager's gradient changes along ts."""
    ahead = eager_gradient(loss, tuple(x + step * t for x, t in zip(xs, ts, strict=True)))
    behind = eager_gradient(loss, tuple(x - step * t for x, t in zip(xs, ts, strict=True)))
    return tuple((a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True))


def dot(a: Tensors, b: Tensors) -> torch.Tensor:
    return sum((u * v).sum() for u, v in zip(a, b, strict=True))  # type: ignore[return-value]


def check(loss: Callable, xs: Tensors, every_mix: bool = True) -> None:
    draw = torch.Generator().manual_seed(1)
    ts, ss = (tuple(torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in xs) for _ in range(2))
    every = tuple(range(len(xs)))
    gradient = tessera.grad(loss, every)

    def tangent(*xs: torch.Tensor) -> torch.Tensor:
        return tessera.jvp(loss, xs, ts)[1]

    want = along(loss, xs, ts)
    with override(strict=True):
        mixes = {"grad of jvp": tessera.grad(tangent, every)(*xs)}
        if every_mix:
            mixes["grad of grad"] = tessera.grad(lambda *xs: dot(gradient(*xs), ts), every)(*xs)
            mixes["jvp of grad"] = tessera.jvp(gradient, xs, ts)[1]
        twice = tessera.jvp(tangent, xs, ss)[1]
    for name, got in mixes.items():
        for g, w in zip(got, want, strict=True):
            assert_close(g, w, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert_close(twice, dot(want, ss), rtol=1e-5, atol=1e-5, msg=lambda m: f"jvp of jvp: {m}")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check(loss_of(lambda x: [FUNCTIONS[name](x)]), (x,))


def test_sinc_at_zero() -> None:
    """Its second derivative there is -π²/3; eager's is not a number."""
    x = torch.zeros((), dtype=torch.float64)
    want = torch.tensor(-(torch.pi**2) / 3, dtype=torch.float64)
    modes = (tessera.grad, tessera.jacfwd, tessera.jacrev)
    with override(strict=True):
        for outer in modes:
            for inner in modes:
                assert_close(outer(inner(torch.sinc))(x), want)


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="it came with a later PyTorch")
@pytest.mark.usefixtures("fresh")  # Dynamo failed on it once, after tests of other files
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunked_linear_cross_entropy(reduction: str) -> None:
    """Eager refuses its second derivative, or gives a wrong one. A compiled program has eager's gradient."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, chunking_method=None)
    x, w, bias = f(5, 4), f(3, 4), f(3)
    target, share = torch.tensor([0, 2, -100, 1, 1]), f(3).abs()
    given = {"weight": share, "reduction": reduction, "ignore_index": -100}

    def chunked(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(x, w, target, linear_bias=bias, options=options, **given).sum()

    def plain(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, w, bias), target, **given).sum()

    want = eager_gradient(plain, (x, w, bias))
    with override(strict=True):
        assert_close(tessera.grad(chunked, (0, 1, 2))(x, w, bias), want)
    assert_close(eager_gradient(tessera.jit(chunked), (x, w, bias)), want)
    check(chunked, (x, w, bias))


@torch.library.custom_op("tessera_test::sine_times", mutates_args=())
def sine_times(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin() * y, x.argsort()


@sine_times.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


def _pull_sine_times(ctx, ct: torch.Tensor, _: object) -> Tensors:  # noqa: ANN001
    x, y = ctx.saved_tensors
    return ct * x.cos() * y, ct * x.sin()


sine_times.register_autograd(_pull_sine_times, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def test_operators_of_a_library() -> None:
    """One with a backward alone: tangents are the transpose of that, where torch.func gives zeros."""
    x, y, s, t = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with override(strict=True):
        both = tessera.jvp(lambda x, y: sine_times(x, y)[0], (x, y), (s, t))[1]
        one = tessera.jvp(lambda y: sine_times(x, y)[0], (y,), (t,))[1]
    assert_close(both, x.cos() * y * s + x.sin() * t)
    assert_close(one, x.sin() * t)
    check(loss_of(lambda x, y: [sine_times(x, y)[0]]), (x, y))


def smooth(sample: Sample) -> bool:
    tensors = [a for a in (*sample.args, *sample.kwargs.values()) if isinstance(a, torch.Tensor)]
    moving = [t for t in tensors if t.is_floating_point()]
    return bool(moving) and not sample.edge and all(t.dtype == torch.float64 and t.numel() for t in moving)


LINEAR = {"view", "shape", "copy", "constructor", "index", "step", "predicate", "random"}
RULED = [
    name
    for name, found in registry().items()
    if found.jvp is not None and found.family not in LINEAR and any(map(smooth, TABLE.get(name, ())))
]


@pytest.mark.parametrize("name", RULED)
def test_declared_operators(name: str) -> None:
    """Reverse mode twice is compared with eager's where the operators' rules are tested."""
    sample = next(s for s in TABLE[name] if smooth(s))
    places = [i for i, a in enumerate(sample.args) if isinstance(a, torch.Tensor) and a.is_floating_point()]

    def outputs(*xs: torch.Tensor) -> list[torch.Tensor]:
        args = list(sample.args)
        for i, x in zip(places, xs, strict=True):
            args[i] = x
        out = (sample.eager or sample.op)(*args, **sample.kwargs)
        return [o for o in (out if isinstance(out, (tuple, list)) else [out]) if o.is_floating_point()]

    xs = tuple(sample.args[i] for i in places)
    loss = loss_of(outputs)
    if loss(*(x.clone().requires_grad_() for x in xs)).requires_grad:
        check(loss, xs, every_mix=False)
