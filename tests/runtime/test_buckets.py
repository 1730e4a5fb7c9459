"""Sizes padded to a few: the same results, fewer programs."""

from __future__ import annotations

import pytest
import torch

import tessera
from tessera.util.errors import InputError, OptionError

W = torch.randn(4, 4)


def causal(x, scale=1.0):
    return x.cumsum(1) @ W * scale, x.shape[0]


def test_results_are_cut_back_and_few_programs_serve_all():
    torch._dynamo.reset()
    buckets = tessera.Buckets((4, 8), inputs={0: 1}, outputs={0: 1})
    fast = tessera.jit(causal, buckets=buckets, dynamic=False, executors=["aten"], strict=True)
    for n in (2, 3, 4, 5, 7, 8):
        x = torch.randn(2, n, 4)
        torch.testing.assert_close(fast(x)[0], causal(x)[0])
    assert len(tessera.stages(fast).graphs()) == 2
    x = torch.randn(2, 11, 4)  # beyond the list: as it is
    torch.testing.assert_close(fast(x)[0], causal(x)[0])


def test_an_argument_may_come_by_position_or_by_name():
    """Whichever way the buckets name it."""

    class Masked(torch.nn.Module):
        def forward(self, x, mask, *, scale=1.0):
            return (x + mask) * scale

    torch._dynamo.reset()
    x, mask = torch.randn(2, 3), torch.randn(2, 3)
    for inputs in ({0: 1, 1: 1}, {"x": 1, "mask": 1}, {0: 1, "mask": -1}):
        buckets = tessera.Buckets((4, 8), inputs=inputs, outputs={0: 1})
        fast = tessera.jit(Masked(), buckets=buckets, dynamic=False, executors=["aten"], strict=True)
        for got in (fast(x, mask), fast(x, mask=mask, scale=1.0), fast(mask=mask, x=x)):
            torch.testing.assert_close(got, x + mask)
        assert all(g.inputs == ("x: f32[2, 4]", "mask: f32[2, 4]") for g in tessera.explain(fast).graphs)


def test_what_does_not_fit_is_named():
    def made(**given):
        return tessera.jit(lambda x: (x * 2, 3), buckets=tessera.Buckets((8,), **given), executors=["aten"])

    x = torch.randn(2, 5)
    for given, told in (
        ({"inputs": {0: 5}}, r"a dimension of argument 0, \(2, 5\), got 5"),
        ({"inputs": {0: 1}, "outputs": {4: 1}}, "tensor as result 4, got 2 results"),
        ({"inputs": {0: 1}, "outputs": {1: 0}}, "tensor as result 1, got int"),
        ({"inputs": {0: 1}, "outputs": {0: 0}}, "padded size 8 along dimension 0, got a tensor of shape"),
        ({"inputs": {"y": 1}}, r"arguments \['y'\], found none"),
    ):
        with pytest.raises(InputError, match=told):
            made(**given)(x)
    with pytest.raises(OptionError, match="from 0 on, got -1"):
        made(inputs={-1: 1})


def test_errors():
    with pytest.raises(OptionError, match="Buckets"):
        tessera.jit(causal, buckets=(4, 8))
    with pytest.raises(OptionError, match="sizes"):
        tessera.Buckets((), {0: 1})
    fast = tessera.jit(lambda a, b: a + b, buckets=tessera.Buckets((4,), {0: 0, 1: 0}), executors=["aten"])
    with pytest.raises(InputError, match="one size"):
        fast(torch.randn(2), torch.randn(3))
