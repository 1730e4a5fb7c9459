"""Gradients of linear interpolation as products: eager's values and layouts, for every size, scale and corner."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tessera
from tessera.passes.patterns import resample

MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
SIZES = {1: ((7,), (20,)), 2: ((5, 8), (13, 16)), 3: ((3, 4, 5), (6, 4, 9))}


@pytest.fixture(autouse=True)
def here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resample, "DEVICES", ("cpu",))
    monkeypatch.setattr(resample.Gradient, "pays", lambda self: True)


def both(fn: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, list[str]]:
    """The gradients, compiled and eager's, and the operators of the compiled backward."""
    torch._dynamo.reset()  # other sizes of the same function would be symbols
    fast = tessera.jit(fn, executors=["tile", "aten"], strict=True)
    gradients = [torch.autograd.grad(one(x).sin().sum(), x)[0] for one in (fast, fn)]
    trace = next(s.trace for s in tessera.stages(fast) if s.name.endswith("resample"))
    return *gradients, [eqn.opname for eqn in trace.equations]  # type: ignore[return-value]


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients(n: int, corners: bool) -> None:
    small, large = SIZES[n]
    for inside, outside in ((small, large), (large, small)):
        x = torch.randn(2, 3, *inside, requires_grad=True)
        got, want, ops = both(lambda x, to=outside: F.interpolate(x, to, mode=MODES[n], align_corners=corners), x)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
        assert not set(ops) & set(resample.GRADIENTS)
        assert {"mm", "bmm"} & set(ops)


@pytest.mark.parametrize("factor", [2, 0.5, 1.7, (3.0, 0.4)])
def test_given_scales(factor: float) -> None:
    x = torch.randn(1, 4, 9, 10, requires_grad=True)
    for again in (False, True):
        how = {"scale_factor": factor, "mode": "bilinear", "recompute_scale_factor": again}
        got, want, _ = both(lambda x, how=how: F.interpolate(x, **how), x)
        torch.testing.assert_close(got, want)


def test_channels_last() -> None:
    x = torch.randn(2, 5, 6, 7).to(memory_format=torch.channels_last).requires_grad_()
    got, want, ops = both(lambda x: F.interpolate(x, (12, 21), mode="bilinear"), x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    assert "bmm" in ops


def test_one_element() -> None:
    x = torch.randn(2, 3, 1, 1, requires_grad=True)
    for corners in (False, True):
        got, want, _ = both(lambda x, c=corners: F.interpolate(x, (4, 1), mode="bilinear", align_corners=c), x)
        torch.testing.assert_close(got, want)


def test_rounded_numbers() -> None:
    """In 16 bits: no further from float64 than eager is."""
    x = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    got, want, _ = both(lambda x: F.interpolate(x, (32, 24), mode="bilinear"), x)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=5e-2)
