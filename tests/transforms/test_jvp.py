"""Forward mode on traces: rules, PyTorch's formulas, what stands still."""

from __future__ import annotations

import math

import pytest
import torch
import torch.func as tf
from torch.testing import assert_close

import tessera
from tessera.frontends.functional.trace import trace_function
from tessera.ir.interp import run
from tessera.ir.verify import verify
from tessera.transforms.jvp import jvp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

PROGRAMS = {
    "pointwise": lambda x: (x.sin() * x.exp() + 1).tanh(),
    "matmul and softmax": lambda x: (x @ x.t()).softmax(-1),
    "lists": lambda x: torch.cat([x, torch.ones(3, 4), x * 2], 1),
    "several results": lambda x: torch.linalg.svd(x)[1],
    "indices": lambda x: x.sort(-1),
    "written in place": lambda x: x.clone().mul_(x).add_(2)[:, 1:],
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "mixed dtypes": lambda x: x.double() * x + 1,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_matches_torch_func(name: str) -> None:
    f = PROGRAMS[name]
    traced = trace_function(f, (X,))
    pushed = verify(jvp(traced.trace, traced.trace.inputs, traced.mode))
    made = run(pushed, X, X.cos())
    outs, tangents = made[: len(traced.trace.outputs)], made[len(traced.trace.outputs) :]
    floats = [i for i, o in enumerate(outs) if o.is_floating_point()]
    want, want_t = tf.jvp(lambda x: [torch.utils._pytree.tree_leaves(f(x))[i] for i in floats], (X,), (X.cos(),))
    assert_close([outs[i] for i in floats], want)
    assert_close([tangents[i] for i in floats], want_t)
    assert all(tangents[i] is None for i in range(len(outs)) if i not in floats)


def test_only_what_moves_has_a_tangent() -> None:
    traced = trace_function(lambda a, b: (a * b, b + 1, a.detach() * 2), (X, X))
    pushed = jvp(traced.trace, [traced.trace.inputs[0]], traced.mode)
    made = run(pushed, X, X, X.cos())
    assert_close(made[3], X * X.cos())
    assert made[4] is None and made[5] is None


def test_tangents_that_are_not_numbers() -> None:
    """`nan_to_num` multiplies tangents and cotangents by 0 or 1, as eager does: NaN stays NaN."""
    x, t = torch.tensor([1.0, math.nan, math.inf, -2.0]), torch.tensor([math.nan, math.nan, 3.0, 4.0])
    for ours, theirs in (
        (tessera.jvp(torch.nan_to_num, (x,), (t,))[1], tf.jvp(torch.nan_to_num, (x,), (t,))[1]),
        (tessera.vjp(torch.nan_to_num, x)[1](t)[0], tf.vjp(torch.nan_to_num, x)[1](t)[0]),
    ):
        assert_close(ours, theirs, equal_nan=True)
