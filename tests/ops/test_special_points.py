"""Derivatives where they are a matter of choice: ties, zeros of both signs, infinities and NaN, as PyTorch has them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import tessera

POINTS = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.0, -0.5], dtype=torch.float64)
A, B = (x.flatten() for x in torch.meshgrid(POINTS, POINTS, indexing="ij"))
ROWS = torch.stack([POINTS[[0, 5, 7, 7]], POINTS[[1, 1, 5, 3]], POINTS[[3, 4, 3, 3]], POINTS[[5, 5, 6, 5]]])

ONE: dict[str, Callable] = {
    "abs": torch.abs,
    "sgn": torch.sgn,
    "relu": torch.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 1.0, 5.0),
    "elu": F.elu,
    "softplus": F.softplus,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp at NaN": lambda x: x.clamp(math.nan, 1),
    "nan_to_num": torch.nan_to_num,
    "sqrt": torch.sqrt,
    "power": lambda x: x**2.5,
    "exponent of zero": lambda x: 0**x,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "maximum of itself": lambda x: torch.maximum(x, x),
    "over a constant": lambda x: torch.maximum(x, torch.ones_like(x)),
    "under a constant": lambda x: torch.minimum(torch.ones_like(x), x),
}
TWO: dict[str, Callable] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "clamp from below": lambda a, b: a.clamp(min=b),
    "clamp from above": lambda a, b: a.clamp(max=b),
    "clamp from both sides": lambda a, b: a.clamp(b, -b),
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "hypot": torch.hypot,
    "atan2": torch.atan2,
    "div": torch.div,
    "pow": torch.pow,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "copysign": torch.copysign,
    "xlogy": torch.xlogy,
    "logaddexp": torch.logaddexp,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b, value=2),
    **{
        f"{loss.__name__}, {reduction}": lambda a, b, loss=loss, reduction=reduction: loss(a, b, reduction=reduction)
        for loss in (F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss)
        for reduction in ("none", "mean")
    },
}
REDUCED: dict[str, Callable] = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(0),
    "max": lambda x: x.max(1)[0],
    "max of all": torch.max,
    "min of all": lambda x: x[:, 2:].min(),
    "median": lambda x: x.median(1)[0],
    "norm": lambda x: x.norm(dim=1),
    "norm of infinite order": lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    "logsumexp": lambda x: x.logsumexp(1),
    "softmax": lambda x: x.softmax(1),
    "std": lambda x: x.std(1),
    "prod": lambda x: x.prod(1),
    "prod of all": torch.prod,
}
CASES = [
    *((name, f, (POINTS,)) for name, f in ONE.items()),
    *((name, f, (A, B)) for name, f in TWO.items()),
    *((name, f, (ROWS,)) for name, f in REDUCED.items()),
]


def _weights(x: torch.Tensor, start: float) -> torch.Tensor:
    return torch.linspace(start, start + 1, x.numel(), dtype=x.dtype).reshape(x.shape)


def _pulled(t, f: Callable, xs: tuple) -> tuple:  # noqa: ANN001
    out, pull = t.vjp(f, *xs)
    return pull(_weights(out, 0.5))


def _pushed(t, f: Callable, xs: tuple) -> torch.Tensor:  # noqa: ANN001
    return t.jvp(f, xs, tuple(_weights(x, 0.5 + i) for i, x in enumerate(xs)))[1]


@pytest.mark.parametrize(("f", "xs"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_derivatives_are_pytorchs(f: Callable, xs: tuple) -> None:
    for derive in (_pulled, _pushed):
        torch.testing.assert_close(derive(tessera, f, xs), derive(torch.func, f, xs), equal_nan=True)


@pytest.mark.parametrize("name", ["maximum", "fmin", "clamp from both sides", "atan2", "div", "lerp", "addcdiv"])
def test_second_derivatives_are_pytorchs(name: str) -> None:
    def second(t) -> tuple:  # noqa: ANN001
        return _pulled(t, lambda *xs: _pushed(t, TWO[name], xs), (A, B))

    torch.testing.assert_close(second(tessera), second(torch.func), equal_nan=True)


@pytest.mark.parametrize("loss", [F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_losses_in_kernels(loss: Callable) -> None:
    def gradients(f: Callable) -> list[torch.Tensor]:
        a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
        out = f(a, b)
        return [out.detach(), *torch.autograd.grad(out, (a, b), _weights(out.detach(), 0.5))]

    def every(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return loss(a, b, reduction="none") * 2

    torch.testing.assert_close(gradients(tessera.jit(every)), gradients(every), equal_nan=True)


PRODUCTS = [
    [2.0, 3.0],
    [math.nan, 2.0],
    [math.inf, 2.0],
    [0.0, 3.0],
    [math.nan, 0.0, 0.0],
    [math.inf, 0.0],
    [math.nan],
    [0.0],
]


@pytest.mark.parametrize("points", PRODUCTS, ids=str)
def test_gradients_of_products_divide_where_eager_does(points: list[float]) -> None:
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    for product in (torch.prod, lambda x: x.prod(0), lambda x: torch.stack([x, x + 1]).t().prod(0, keepdim=True).sum()):
        expected = torch.autograd.grad(product(x), x)
        torch.testing.assert_close(torch.autograd.grad(tessera.jit(product)(x), x), expected, equal_nan=True)


@pytest.mark.parametrize("dim", [0, -1])
def test_gradients_of_running_products_divide_where_eager_does(dim: int) -> None:
    points = torch.tensor([math.nan, math.inf, 0.0, 2.0, -0.5], dtype=torch.float64)
    rows = torch.cartesian_prod(points, points, points, points)
    for x in (rows if dim else rows.t(), rows[:, :1], rows[:0], rows[7, 1]):
        x = x.clone().requires_grad_()
        scan = torch.cumprod if x.ndim else lambda x, _: x.cumprod(0)
        expected = torch.autograd.grad(scan(x, dim), x, _weights(x.detach(), 0.5))
        found = torch.autograd.grad(tessera.jit(scan, strict=True)(x, dim), x, _weights(x.detach(), 0.5))
        torch.testing.assert_close(found, expected, equal_nan=True)
