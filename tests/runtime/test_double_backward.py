"""Gradients of gradients through compiled graphs, of any order, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tessera

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


def same(got: list, want: list) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        if w is None or g is None:  # zeros and nothing mean the same where a derivative ends
            assert all(x is None or not x.any() for x in (g, w))
        else:
            torch.testing.assert_close(g, w, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_three_orders(name: str) -> None:
    f, shapes = FUNCTIONS[name]
    fast = tessera.jit(f, frontend="functional", strict=True, executors=PLAIN)
    same(orders(fast, shapes, 3), orders(f, shapes, 3))


# What these save are results; their inputs are gone when a gradient is differentiated.
SAVE_RESULTS = ("exp", "linear and bias", "softmax", "relu", "views", "cross_entropy", "embedding", "written inside")


@pytest.mark.parametrize("name", SAVE_RESULTS)
def test_three_orders_of_inputs_that_nobody_holds(name: str) -> None:
    f, shapes = FUNCTIONS[name]
    same(orders(tessera.jit(f, strict=True), shapes, 3, leaves=False), orders(f, shapes, 3, leaves=False))
