"""canonicalise: the identities that hold bit for bit go, the others stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import assert_same, trace_of

from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.dce import dce

FLOAT = torch.tensor([[1.5, -0.0, float("nan"), float("inf")]] * 4)
WHOLE = torch.arange(16).reshape(4, 4)


def left(fn, *args, differentiable=True):
    trace = trace_of(fn, *args)
    after = canonicalise(trace, differentiable=differentiable)
    assert_same(trace, after, *args)
    return [eqn.op._opname for eqn in dce(after).equations]


GONE = {
    "x * 1": lambda x: (x.exp() * 1).sin(),
    "x * 1.0": lambda x: (x.exp() * 1.0).sin(),
    "x / 1": lambda x: (x.exp() / 1).sin(),
    "x - 0": lambda x: (x.exp() - 0).sin(),
    "-(-x)": lambda x: x.exp().neg().neg().sin(),
    "clone": lambda x: x.exp().clone().sin(),
    "t of t": lambda x: x.exp().t().t().sin(),
    "transposed back": lambda x: x.exp().transpose(0, 1).transpose(1, 0).sin(),
    "permuted back": lambda x: x.exp().permute(1, 0).permute(1, 0).sin(),
    "view of its shape": lambda x: x.exp().view(4, 4).sin(),
    "reshaped back": lambda x: x.exp().reshape(16).reshape(4, 4).sin(),
    "expand to its shape": lambda x: x.exp().expand(4, 4).sin(),
    "whole slice": lambda x: x.exp()[:, 0:].sin(),
    "dropout at rest": lambda x: F.dropout(x.exp(), 0.5, training=False).sin(),
    "to double and back": lambda x: x.exp().double().float().sin(),
}


@pytest.mark.parametrize("name", GONE)
def test_gone(name):
    assert left(GONE[name], FLOAT) == ["exp", "sin"]


def test_a_first_power_is_gone_where_nothing_is_differentiated():
    """Its gradient depends on x in eager, though it is always one."""
    assert left(lambda x: torch.pow(x.exp(), 1).sin(), FLOAT) == ["exp", "pow", "sin"]
    assert left(lambda x: torch.pow(x.exp(), 1).sin(), FLOAT, differentiable=False) == ["exp", "sin"]


STAYS = {
    "-0.0 + 0 is 0.0": (lambda x: (x.exp() + 0).sin(), FLOAT),
    "x * 0 keeps nan": (lambda x: (x.exp() * 0).sin(), FLOAT),
    "a half loses bits": (lambda x: x.exp().half().float().sin(), FLOAT),
    "division promotes": (lambda n: (n.abs() / 1).sin(), WHOLE),
    "a float scalar promotes": (lambda n: (n.abs() * 1.0).sin(), WHOLE),
    "another layout": (lambda x: x.exp().t().clone(memory_format=torch.contiguous_format).sin(), FLOAT),
    "training dropout": (lambda x: F.dropout(x.exp(), 0.5).sin(), FLOAT),
}


@pytest.mark.parametrize("name", STAYS)
def test_stays(name):
    assert len(left(*STAYS[name])) >= 3


def test_whole_numbers_plus_zero():
    assert left(lambda n: (n.abs() + 0).neg(), WHOLE) == ["abs", "neg"]


def test_fresh_memory_for_the_caller():
    assert left(lambda x: x.clone(), FLOAT) == ["clone"]
    assert left(lambda x: x * 1, FLOAT) == ["mul"]
    assert left(lambda x: (y := x.exp(), y.clone()), FLOAT) == ["exp", "clone"]
    assert left(lambda x: x.exp().clone().t(), FLOAT) == ["exp", "clone", "t"]
    assert left(lambda x: torch.tensor([1.0, 2.0]), FLOAT) == ["lift_fresh_copy", "detach"]
    assert left(lambda x: x.clone().exp(), FLOAT) == ["clone", "exp"]  # backward may keep the copy


def test_views_merge():
    assert left(lambda x: x.exp().view(2, 8).view(8, 2).view(16).sin(), FLOAT) == ["exp", "view", "sin"]
    assert left(lambda x: x[None].expand(3, 4, 4).expand(3, 4, 4).sin(), FLOAT) == [
        "unsqueeze",
        "expand",
        "sin",
    ]
    assert left(lambda x: x[None].permute(2, 0, 1).permute(2, 1, 0).sin(), FLOAT)[1] == "permute"


def test_detach_stops_gradients_until_there_are_none():
    assert left(lambda x: x.exp().detach().sin(), FLOAT) == ["exp", "detach", "sin"]
    assert left(lambda x: x.exp().detach().sin(), FLOAT, differentiable=False) == ["exp", "sin"]


def test_no_grad_keeps_its_own():
    def fn(x):
        y = x.exp()
        with torch.no_grad():
            z = y * 1
        return z.sin()

    assert left(fn, FLOAT) == ["exp", "mul", "sin"]
    assert left(fn, FLOAT, differentiable=False) == ["exp", "sin"]


def test_stored_copies():
    def fn(x, y):
        x[1:3] = y.t()[:2]
        return x.sum()

    assert "copy" not in left(fn, torch.randn(4, 4), torch.randn(4, 4))


def test_a_copy_that_keeps_old_contents_stays():
    def fn(x):
        old = x[:2].clone()
        x[:2] = x[2:]
        x[2:] = old
        return x.sum()

    assert "clone" in left(fn, torch.randn(4, 4))
