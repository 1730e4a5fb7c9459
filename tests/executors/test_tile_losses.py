"""Losses by the tile executor: every form of cross entropy, its gradient, and what it refuses; regression losses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import tessera

ROWS, CLASSES = 37, 50
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 3},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "reduction": "none", "ignore_index": 3},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.2},
]


def loss_of(options: dict, dtype: torch.dtype) -> Callable:
    given = dict(options)
    if given.pop("weight", False):
        given["weight"] = torch.linspace(0.1, 2, CLASSES, dtype=dtype)
    space: dict = {"F": F, "given": given}
    exec("def loss(x, t):\n    return F.cross_entropy(x, t, **given)", space)  # a code object a case, for Dynamo
    return space["loss"]


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, CLASSES, generator=generator).to(dtype) * 4
    t = torch.randint(CLASSES, (ROWS,), generator=generator)
    t[4], t[7] = -100, 3
    return x, t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("train", [False, True])
def test_as_eager(dtype: torch.dtype, options: dict, train: bool) -> None:
    x, t = inputs(dtype)
    t = torch.where(t == -100, options.get("ignore_index", -100), t)
    loss = loss_of(options, dtype)
    fast = tessera.jit(loss_of(options, dtype), executors=["tile", "aten"])
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
    ours, eager = x.clone().requires_grad_(train), x.clone().requires_grad_(train)
    a, b = fast(ours, t), loss(eager, t)
    torch.testing.assert_close(a, b, **tolerance)
    if train:
        ct = torch.linspace(-1, 1, a.numel(), dtype=a.dtype).reshape(a.shape) + 0.5
        a.backward(ct)
        b.backward(ct)
        torch.testing.assert_close(ours.grad, eager.grad, **tolerance)


@pytest.mark.parametrize("train", [False, True])
def test_a_class_that_is_not_there(train: bool) -> None:
    x, t = inputs(torch.float32)
    fast = tessera.jit(loss_of({}, torch.float32), executors=["tile", "aten"])
    fast(x.requires_grad_(train), t)
    for wrong in (CLASSES, -1):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            fast(x, torch.where(t == 3, wrong, t))


def test_rows_of_infinities() -> None:
    x, t = inputs(torch.float32)
    t[:] = 2
    x[0] = -math.inf
    x[1, 5] = math.inf
    x[2, 5] = math.nan
    x[3, 2:] = -math.inf
    options = {"reduction": "none"}
    fast = tessera.jit(loss_of(options, torch.float32), executors=["tile", "aten"])
    torch.testing.assert_close(fast(x, t), loss_of(options, torch.float32)(x, t), equal_nan=True)


def test_one_kernel_reads_the_logits() -> None:
    """Forward needs one region over the logits, backward another without a reduction."""
    x = torch.randn(64, 4096, requires_grad=True)
    fast = tessera.jit(loss_of({}, torch.float32), executors=["tile", "aten"])
    fast(x, torch.randint(4096, (64,))).backward()
    report = str(tessera.explain(fast))
    assert "nll_loss" not in report.split("saves")[0] and "tessera.class_logit" in report


REGRESSION = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss]


def gradients(loss: Callable, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    x, target = x.clone().requires_grad_(), target.clone().requires_grad_()
    out = loss(x, target)
    return [out, *torch.autograd.grad(out.sum(), [x, target])]


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("loss", REGRESSION, ids=lambda f: f.__name__)
def test_regression_losses_of_infinities(loss: Callable, reduction: str) -> None:
    numbers = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -0.3, 2.5], dtype=torch.float64)
    x, target = (t.contiguous() for t in torch.meshgrid(numbers, numbers, indexing="ij"))

    def f(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(x, target, reduction=reduction)

    fast = tessera.jit(f, executors=["tile", "aten"])
    torch.testing.assert_close(gradients(fast, x, target), gradients(f, x, target), equal_nan=True)


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize("loss", REGRESSION, ids=lambda f: f.__name__)
def test_regression_losses_of_nothing(loss: Callable, frontend: str) -> None:
    x = torch.ones(0, 4)
    for executors in (["tile", "aten"], ["aten"]):
        fast = tessera.jit(lambda x, target: loss(x, target), executors=executors, frontend=frontend)
        torch.testing.assert_close(gradients(fast, x, x), gradients(loss, x, x), equal_nan=True)
