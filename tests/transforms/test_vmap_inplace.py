"""Writes under vmap: into arguments that carry the batch, into ones that do not, and what is given back of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.func as tf
from torch.testing import assert_close

import tessera as t
from tessera.util.config import config

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.5


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func does not take over."""
    monkeypatch.setattr(config, "strict", True)


UNARY = ("acos_", "exp_", "neg_", "sigmoid_", "sqrt_", "tanh_", "zero_", "relu_", "round_", "cumsum_")


@pytest.mark.parametrize("name", UNARY)
def test_the_result_is_the_written_argument(name: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return getattr(x, name)(0) if name == "cumsum_" else getattr(x, name)()

    x = X / 2
    want = torch.stack([f(r.clone()) for r in x])
    given = x.clone()
    made = t.vmap(f)(given)
    assert made is given
    assert_close(given, want)
    given = x.t().contiguous()
    made = t.vmap(f, 1)(given)
    assert_close(made, want)
    assert_close(given.t(), want)
    given.fill_(7)
    assert made.eq(7).all()  # one memory
    given = x.clone()
    nested = t.vmap(t.vmap(f))(given[None]) if name != "cumsum_" else t.vmap(f)(given)
    given.fill_(7)
    assert nested.eq(7).all()


VIEWS: dict[str, Callable] = {
    "a part": lambda x: x.mul_(2)[1:],
    "turned": lambda x: x.add_(1).view(2, 2).t(),
    "one element": lambda x: x.exp_()[2],
    "several": lambda x: x.neg_().split(2)[1],
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_written_argument_share_its_memory(name: str, dim: int) -> None:
    x, y = (X.movedim(0, dim).clone() for _ in range(2))
    made, want = t.vmap(VIEWS[name], dim)(x), tf.vmap(VIEWS[name], dim)(y)
    assert_close(made, want)
    assert_close(x, y)
    x.fill_(7)
    assert made.eq(7).all()


def test_an_argument_given_back_is_that_tensor() -> None:
    assert t.vmap(lambda x: x)(X) is X
    assert t.vmap(lambda x: x, 1, 1)(X) is X
    turned = t.vmap(lambda x: x, 0, 1)(X)
    assert turned.data_ptr() == X.data_ptr() and turned.shape == (4, 3)


BATCHED_INTO_ONE: dict[str, Callable] = {
    "add_": lambda y, x: y.add_(x),
    "copy_": lambda y, x: y.copy_(x),
    "fill_": lambda y, x: y.fill_(x[0]),
    "y[0] = x": lambda y, x: y.__setitem__(0, x[0]),
    "masked_fill_": lambda y, x: y.masked_fill_(x > 1, 0.0),
    "out=": lambda y, x: torch.sin(x, out=y),
}


@pytest.mark.parametrize("name", BATCHED_INTO_ONE)
def test_examples_do_not_write_into_one_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.zeros(4)

    def f(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        BATCHED_INTO_ONE[name](y, x)
        return y.sum()

    for strict in (True, False):  # our own refusal, and with torch.func's last word
        monkeypatch.setattr(config, "strict", strict)
        with pytest.raises(RuntimeError, match="not batched"):
            t.vmap(f, (None, 0))(one, X)
    assert one.eq(0).all()


def test_one_tensor_is_written_once() -> None:
    one = torch.zeros(4)
    made = t.vmap(lambda y, x: y.add_(1) * x, (None, 0))(one, X)
    assert_close(made, X)
    assert one.eq(1).all()


def test_a_tensor_of_the_function_takes_rows() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 4)
        out[0] = x
        out[1].copy_(x * 2)
        return out

    assert_close(t.vmap(f)(X), torch.stack([X, X * 2], 1))
