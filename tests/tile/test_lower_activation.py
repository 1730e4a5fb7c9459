"""Activations of 16 bits by cheaper formulas: how near they are, over every number there is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from fresh import compiled

from tessera.tile.dialect.build import KernelBuilder, f32
from tessera.tile.dialect.interp import run
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.from_trace.lower.activation import erfc_of_minus
from tessera.tile.from_trace.values import Emit, T
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.cpu.target import CpuTarget

HALF = [torch.bfloat16, torch.float16]


def every(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def erfc_kernel(n: int) -> KernelOp:
    k = KernelBuilder("erfc")
    i = k.axis("i", n)
    x, y = k.buffer(f32), k.buffer(f32)
    emit = Emit(k)
    value = erfc_of_minus(T(emit, torch.float32, frozenset("i"), k.load(x, i)))
    k.store(value.ssa, y, i)  # type: ignore[arg-type]
    return k.finish()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("how", ["interpreter", "cpu"])
def test_one_plus_erf(dtype: torch.dtype, how: str) -> None:
    x = every(dtype).float()
    out = [x, torch.zeros_like(x)]
    kernel = erfc_kernel(x.numel())
    if how == "interpreter":
        run(kernel, out)
    else:
        CpuTarget().compile(kernel, Schedule())(out, [])
    want = torch.special.erfc(-x.double())
    off = (out[1].double() - want).abs()
    kept = ~x.isnan()
    assert out[1][~kept].isnan().all()
    assert (off <= torch.where(want > 1e-9, 1e-5 * want, 1e-9))[kept].all()


def exact(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """gelu in double precision, without cancellation."""
    if approximate == "none":
        return x * 0.5 * torch.special.erfc(-x * math.sqrt(0.5))
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_every_number(dtype: torch.dtype, approximate: str) -> None:
    """Within one part in twenty of rounding itself: the nearest number, or where it is a near tie the other one."""
    x = every(dtype)
    x = x[x.isfinite()]
    fast = compiled(lambda x: F.gelu(x, approximate=approximate) * 1.0)
    got, want = fast(x), exact(x.double(), approximate)
    grain = torch.finfo(dtype).eps * torch.maximum(want.abs(), torch.tensor(torch.finfo(dtype).tiny).double())
    assert ((got.double() - want).abs() <= 0.55 * grain + 1e-9).all()
    assert (got == want.to(dtype)).double().mean() > 0.99


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gradient_of_gelu(dtype: torch.dtype, approximate: str) -> None:
    x = every(dtype)
    x = x[x.abs() <= 100]
    given, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    compiled(lambda x: F.gelu(x, approximate=approximate) * 1.0)(given).sum().backward()
    F.gelu(wide, approximate=approximate).sum().backward()
    off = (given.grad.double() - wide.grad).abs()
    assert (off <= 0.55 * torch.finfo(dtype).eps * wide.grad.abs() + 3e-6).all()
