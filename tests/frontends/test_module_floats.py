"""Floats of modules and of code are constants with a guard where sizes are symbols; what changes becomes an input."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tessera

FACTOR = 0.75


class Norm(nn.Module):
    """A norm as libraries write it, with numbers of the module, of another object, of a library and of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.settings = nn.Parameter(torch.randn(8)), 1e-5, {"scale": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return x * self.settings["scale"] * math.sqrt(2 / math.pi) * FACTOR


def inputs(fast: object) -> list[str]:
    """Numbers that the last program is given, as tensors."""
    trace = next(s.trace for s in tessera.stages(fast) if s.name == "captured")
    return [v.name for v in trace.inputs if getattr(v.type, "dtype", None) == torch.float64]


def graphs(fast: object) -> int:
    return len(fast.__tessera__.backend.graphs)  # type: ignore[attr-defined]


def test_numbers_of_modules_and_of_code_are_constants():
    model = Norm()
    fast = tessera.jit(model, dynamic=True, strict=True)
    for rows in (4, 6, 9):
        x = torch.randn(rows, 8)
        assert_close(fast(x), model(x))
    assert graphs(fast) == 1 and not inputs(fast)


def test_one_that_changes_is_compiled_once_more():
    model = Norm()
    fast = tessera.jit(model, dynamic=True, strict=True)
    for eps in (1e-5, 0.5, 0.25, 0.125, 0.75):
        model.eps = eps
        x = torch.randn(4, 8)
        assert_close(fast(x), model(x))
    assert graphs(fast) == 2


def test_a_global_number_that_changes(monkeypatch):
    model = Norm()
    fast = tessera.jit(model, dynamic=True, strict=True)
    for factor in (0.75, 2.5, 3.5, 4.5):
        monkeypatch.setattr(f"{__name__}.FACTOR", factor)
        x = torch.randn(4, 8)
        assert_close(fast(x), model(x))
    assert graphs(fast) == 2


def test_an_argument_is_no_constant():
    fast = tessera.jit(lambda x, scale: x * scale, dynamic=True, strict=True)
    for scale in (0.5, 0.25, 4.5):
        x = torch.randn(4, 8)
        assert_close(fast(x, scale), x * scale)
    assert graphs(fast) == 1
