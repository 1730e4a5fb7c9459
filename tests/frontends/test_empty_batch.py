"""A batch norm of nothing: it gives nothing and leaves its statistics as they were, as eager has it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tessera


def observed(compiled: Callable, shape: tuple[int, ...], training: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4).train(training)
    x = torch.randn(shape, requires_grad=True)
    y = compiled(norm)(x)
    y.sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in norm.parameters()), *norm.buffers()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(0, 4), (0, 3), (2, 4, 0)])  # eager does not look at the channels of nothing
def test_a_batch_norm_of_nothing(shape: tuple[int, ...], training: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Tessera could not")
        got = observed(tessera.jit, shape, training)
    torch.testing.assert_close(got, observed(lambda m: m, shape, training))
