"""split_bias: a bias leaves its layer where kernels add it, and only there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from programs import assert_same, trace_of

from tessera.ir.equation import Equation
from tessera.passes.decompose.split_bias import split_bias
from tessera.tile.from_trace.region import kind_of, why_not

X, W, B, Y = torch.randn(3, 5, 8), torch.randn(6, 8), torch.randn(6), torch.randn(3, 5, 6)


def kind(eqn: Equation) -> str:
    product = eqn.op._opname in ("linear", "matmul")  # type: ignore[union-attr]
    return "" if product or why_not(eqn) else kind_of(eqn)


def split(fn, *args) -> list[str]:
    before = trace_of(fn, *args)
    after = split_bias(before, lambda layer: layer.out.dtype == torch.float32, kind)
    assert_same(before, after, *args)
    return [f"{e.op._opname}/{len(e.args)}" for e in after.equations]


def test_a_kernel_adds_the_bias():
    assert split(lambda x, w, b: F.gelu(F.linear(x, w, b)), X, W, B) == ["linear/2", "add/2", "gelu/1"]
    assert split(lambda x, w, b, y: F.linear(x, w, b) + y, X, W, B, Y)[:2] == ["linear/2", "add/2"]
    assert split(lambda x, w, b: F.linear(x, w, b).view(15, 6).relu(), X, W, B)[:2] == ["linear/2", "add/2"]


def test_a_bias_that_no_kernel_would_add_stays():
    assert split(lambda x, w, b: F.linear(x, w, b), X, W, B) == ["linear/3"]
    assert split(lambda x, w, b: (F.linear(x, w, b).view(15, 6), 1)[0], X, W, B)[0] == "linear/3"
    both = split(lambda x, w, b: F.linear(F.linear(x, w, b).relu(), w.t(), b.sum().expand(8)), X, W, B)
    assert both[:2] == ["linear/2", "add/2"] and both[-1] == "linear/3"
    assert split(lambda x, w, b: (lambda h: h.relu() + (h @ w).sum())(F.linear(x, w, b)), X, W, B)[0] == "linear/3"
    assert split(lambda x, w: F.linear(x, w).relu(), X, W)[0] == "linear/2"
    assert split(lambda x, w, b: F.linear(x, w, b).relu(), X.double(), W.double(), B.double())[0] == "linear/3"
