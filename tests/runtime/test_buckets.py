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


def test_errors():
    with pytest.raises(OptionError, match="Buckets"):
        tessera.jit(causal, buckets=(4, 8))
    with pytest.raises(OptionError, match="sizes"):
        tessera.Buckets((), {0: 1})
    fast = tessera.jit(lambda a, b: a + b, buckets=tessera.Buckets((4,), {0: 0, 1: 0}), executors=["aten"])
    with pytest.raises(InputError, match="one size"):
        fast(torch.randn(2), torch.randn(3))
