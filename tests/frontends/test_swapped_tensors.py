"""Tensors exchanged by `torch.utils.swap_tensors` after a program was compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import tessera

WAYS = {
    "jit": tessera.jit,
    "functional": lambda m: tessera.jit(m, frontend="functional"),
    "backend": lambda m: torch.compile(m, backend="tessera"),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_parameters_and_buffers_are_swapped(way: Callable) -> None:
    model, x = Model(), torch.ones(2, 3)
    fast = way(model)
    fast(x).sum().backward()
    torch.utils.swap_tensors(model.linear.weight, nn.Parameter(torch.eye(3) * 2))
    torch.utils.swap_tensors(model.scale, torch.full((3,), 5.0))
    out = fast(x)
    torch.testing.assert_close(out, model(x))
    out.sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, torch.full((3, 3), 10.0))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_modules_that_swap_when_they_are_converted(way: Callable) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model, x = Model(), torch.ones(2, 3)
        fast = way(model)
        fast(x)
        model.double()
        torch.testing.assert_close(fast(x.double()), model(x.double()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
