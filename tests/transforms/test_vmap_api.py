"""What vmap takes and refuses: dimensions, structures, functions without tensors; operators that no rule batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.func as tf
from torch.testing import assert_close

import tessera as t
from tessera.util.config import config
from tessera.util.errors import TesseraError

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
ADD = torch.add

MISUSE: dict[str, tuple[Callable, type[Exception]]] = {
    "no arguments": (lambda m: m.vmap(lambda: torch.ones(1))(), ValueError),
    "no tensors": (lambda m: m.vmap(lambda x: torch.ones(1), (None,))(3), ValueError),
    "nothing mapped": (lambda m: m.vmap(torch.sin, (None,))(X), ValueError),
    "a number mapped": (lambda m: m.vmap(ADD)(X, 3), ValueError),
    "sizes that differ": (lambda m: m.vmap(ADD)(X, X.t()), ValueError),
    "too few in_dims": (lambda m: m.vmap(ADD, (0,))(X, X), ValueError),
    "in_dims no tuple": (lambda m: m.vmap(ADD, [0, 0])(X, X), ValueError),
    "in_dims beyond": (lambda m: m.vmap(torch.sin, 2)(X), ValueError),
    "in_dims below": (lambda m: m.vmap(torch.sin, -3)(X), ValueError),
    "a scalar mapped": (lambda m: m.vmap(torch.sin)(torch.ones(())), ValueError),
    "out_dims beyond": (lambda m: m.vmap(torch.sin, 0, 2)(X), IndexError),
    "out_dims of other structure": (lambda m: m.vmap(torch.sin, 0, (0, 0))(X), ValueError),
    "out_dims no dimensions": (lambda m: m.vmap(torch.sin, 0, "first")(X), ValueError),
    "out_dims None": (lambda m: m.vmap(torch.sin, 0, None)(X), ValueError),
    "a number given back": (lambda m: m.vmap(lambda x: 3.0)(X), ValueError),
    "text given back": (lambda m: m.vmap(lambda x: (x, "a"))(X), ValueError),
    "chunks of nothing": (lambda m: m.vmap(torch.sin, chunk_size=0)(X), ValueError),
    "unknown randomness": (lambda m: m.vmap(torch.sin, randomness="some")(X), RuntimeError),
    "a number asked for": (lambda m: m.vmap(lambda x: x * x.sum().item())(X), RuntimeError),
    "an if on a tensor": (lambda m: m.vmap(lambda x: x if x.sum() > 0 else -x)(X), RuntimeError),
    "a shape that depends on data": (lambda m: m.vmap(lambda x: x.nonzero())(X), RuntimeError),
    "a sum that does not fit": (lambda m: m.vmap(lambda x: x + torch.ones(5))(X), RuntimeError),
    "the user's own": (lambda m: m.vmap(lambda x: {}["a"])(X), KeyError),
}


@pytest.mark.parametrize("name", MISUSE)
def test_errors_are_of_the_class_that_torch_func_raises(name: str) -> None:
    call, kind = MISUSE[name]
    with pytest.raises(kind) as theirs:
        call(tf)
    with pytest.raises(kind) as ours:
        call(t)
    assert str(theirs.value).splitlines()[0][:40] in str(ours.value)


def test_our_own_refusals_are_tesseras_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for strict in (False, True):
        monkeypatch.setattr(config, "strict", strict)
        for name in ("sizes that differ", "too few in_dims", "out_dims None", "a number given back"):
            with pytest.raises(TesseraError, match="vmap: ") as caught:
                MISUSE[name][0](t)
            assert isinstance(caught.value, ValueError)


def test_what_only_torch_func_can_map_still_runs() -> None:
    scale, weight = torch.tensor(2.0), torch.randn(3, requires_grad=True)
    with pytest.warns(UserWarning, match=r"torch\.func ran it instead"):
        assert_close(t.vmap(lambda x: x * scale.item())(X), X * 2)
    with pytest.warns(UserWarning, match=r"torch\.func ran it instead"):
        rows = t.vmap(lambda v: torch.autograd.grad([weight * 3], [weight], [v])[0])(torch.eye(3))
    assert_close(rows, 3 * torch.eye(3))


def test_gradients_batched_by_autograd() -> None:
    x = X.clone().requires_grad_()
    y = t.vmap(lambda r: r.sin().cumsum(0))(x)
    cotangents = torch.eye(6).view(6, 2, 3)
    (rows,) = torch.autograd.grad(y, x, cotangents, is_grads_batched=True, retain_graph=True)
    want = torch.stack([torch.autograd.grad(y, x, c, retain_graph=True)[0] for c in cotangents])
    assert_close(rows, want)


def test_transforms_inside_each_other() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (t.vmap(lambda a, b: a * b.sin(), (0, None))(x, x) ** 2).sum()

    def g(x: torch.Tensor) -> torch.Tensor:
        return (tf.vmap(lambda a, b: a * b.sin(), (0, None))(x, x) ** 2).sum()

    assert_close(t.vmap(t.grad(f))(X), tf.vmap(tf.grad(g))(X))
    assert_close(t.vmap(t.jacrev(t.grad(f)))(X), tf.vmap(tf.jacrev(tf.grad(g)))(X))


# --- operators that no rule batches -------------------------------------------------------------------


@torch.library.custom_op("tessera_tests::ranked", mutates_args=())
def ranked(x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = by.argsort()
    return x[order], order


@ranked.register_fake
def _(x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(by, dtype=torch.int64)


def test_an_operator_without_a_rule_runs_for_every_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "strict", True)
    keys = X.flip(1)
    for args, dims in (((X, keys), (0, 0)), ((X[0], keys), (None, 0)), ((X.t(), keys[0]), (1, None))):
        rows = [[a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True)] for i in range(2)]
        want = [torch.stack(column) for column in zip(*(ranked(*row) for row in rows), strict=True)]
        assert_close(list(t.vmap(ranked, dims)(*args)), want)
    empty, order = t.vmap(ranked)(X[:0], keys[:0])
    assert empty.shape == (0, 3) and order.dtype == torch.int64
