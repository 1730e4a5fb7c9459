"""Functions that several threads trace at once, and PyTorch afterwards."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.testing import assert_close

from tessera.frontends.functional.trace import WATCHED
from tessera.func import api as t

PLACES = torch.tensor([2, 0, 1, 3, 1])
LSTM = torch.nn.LSTM(4, 3)


def branches(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() * k, lambda x: x * k, (x,)).sum()


def indices(x: torch.Tensor, k: int) -> torch.Tensor:
    return (x[PLACES] * k).sum() + x[torch.tensor(1)]


def masks(x: torch.Tensor, k: int) -> torch.Tensor:
    y = x.clone()
    y[y < 0] = 0
    return (y * k).sin().sum()


def layers(x: torch.Tensor, k: int) -> torch.Tensor:
    return LSTM((x * k).reshape(1, 1, 4))[0].sum()


def flags(x: torch.Tensor, k: int) -> torch.Tensor:
    return (x * k if x.requires_grad else x).square().sum()


FUNCTIONS = (branches, indices, masks, layers, flags)


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def of_eager(f: Callable, x: torch.Tensor, k: int) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(f(leaf, k), leaf)[0]


def test_transforms_in_several_threads(often: None) -> None:
    x = torch.randn(4)
    t.grad(lambda y: y.sum())(x)
    before = [vars(owner).get(name) for owner, name, _ in WATCHED]
    onednn = torch.backends.mkldnn.enabled
    want = {(f, k): of_eager(f, x, k) for f in FUNCTIONS for k in range(1, 5)}  # torch.cond wants one thread alone
    wrong: list[str] = []

    def wrong_by(f: Callable, k: int) -> str:
        try:
            assert_close(t.grad(lambda x: f(x, k))(x), want[f, k])
        except Exception as error:  # noqa: BLE001  (a thread's errors are nobody's)
            return f"{f.__name__}, {k}: {error}"
        return ""

    def work(k: int) -> None:
        wrong.extend(filter(None, (wrong_by(f, k) for f in FUNCTIONS * 2)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what cannot be traced, and runs by torch.func
        threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    after = [vars(owner).get(name) for owner, name, _ in WATCHED]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert "requires_grad" not in vars(torch.Tensor) and torch.backends.mkldnn.enabled == onednn
