"""Writes through windows (unfold): where they do not overlap, each element has one place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tessera


def beside_each_other(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.unfold(0, 2, 2).mul_(torch.tensor([2.0, 3.0]))
    return y


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    windows = y.unfold(-1, 2, 3)
    windows[0] = 0
    windows += 1
    return y


def patches(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.unfold(0, 2, 2).unfold(1, 3, 3)[:, 0].sin_()
    return y


def only_one(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.unfold(0, x.shape[0], 1).exp_()
    return y


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize("program", [beside_each_other, with_gaps, patches, only_one])
def test_written_windows(program: Callable, frontend: str) -> None:
    seen = []
    for call in (program, tessera.jit(program, executors=["aten"], frontend=frontend, strict=True)):
        x = torch.arange(35.0).reshape(5, 7).requires_grad_()
        out = call(x)
        out.square().sum().backward()
        seen.append((out.detach(), x.grad))
    torch.testing.assert_close(seen[1], seen[0])
