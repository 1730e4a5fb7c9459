"""Optimizers that scale elements by their past gradients: equations of a compiled step follow PyTorch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tessera

OPTIMIZERS: dict[str, Callable] = {
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2),
    "rmsprop, all of it": lambda ps: torch.optim.RMSprop(
        ps, lr=1e-2, alpha=0.9, momentum=0.5, centered=True, weight_decay=0.1, maximize=True
    ),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.5, weight_decay=0.1),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=1e-2, weight_decay=0.1, maximize=True),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=1e-2, betas=(0.9, 0.9)),
    "radam, coupled": lambda ps: torch.optim.RAdam(ps, lr=1e-2, weight_decay=0.1),
    "radam, decoupled": lambda ps: torch.optim.RAdam(ps, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_follow_eager(name: str) -> None:
    """Weights and state, under the optimizer's own names; before RAdam scales by squares, and after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    other = copy.deepcopy(model)
    mine, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    step = tessera.train_step(model, lambda m, x: m(x).square().mean(), mine, executors=["aten"], strict=True)
    for i in range(9):
        x = torch.randn(5, 4, dtype=torch.float64)
        theirs.zero_grad()
        want = other(x).square().mean()
        want.backward()
        theirs.step()
        torch.testing.assert_close(step(x), want.detach())
        if i == 4:
            mine.load_state_dict(copy.deepcopy(mine.state_dict()))
    assert not tessera.explain(step).eager
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        assert mine.state[p].keys() == theirs.state[q].keys()
        for key, value in theirs.state[q].items():
            torch.testing.assert_close(mine.state[p][key], value, rtol=1e-12, atol=1e-12)
