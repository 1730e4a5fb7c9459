"""Recurrent layers under transforms: oneDNN's and PyTorch's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tessera

LAYERS = {
    "lstm": lambda: nn.LSTM(3, 2, num_layers=2, bidirectional=True),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "gru": lambda: nn.GRU(3, 2),
    "rnn": lambda: nn.RNN(3, 2),
}


@pytest.fixture(params=LAYERS)
def loss(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    layer = LAYERS[request.param]().double()
    return lambda x: layer(x)[0].pow(2).sum()


@pytest.fixture(autouse=True)
def ours():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Tessera cannot trace")
        yield


def gradient(loss: Callable, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


def test_gradients(loss: Callable) -> None:
    x = torch.randn(5, 4, 3, dtype=torch.double)
    torch.testing.assert_close(tessera.grad(loss)(x), gradient(loss, x))


def test_gradients_of_a_batch(loss: Callable) -> None:
    x = torch.randn(2, 5, 4, 3, dtype=torch.double)
    torch.testing.assert_close(tessera.vmap(tessera.grad(loss))(x), torch.stack([gradient(loss, one) for one in x]))


def test_forward_mode(loss: Callable) -> None:
    x, t = torch.randn(2, 5, 4, 3, dtype=torch.double)
    torch.testing.assert_close(tessera.jvp(loss, (x,), (t,))[1], (gradient(loss, x) * t).sum())
