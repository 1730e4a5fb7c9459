"""fold computes small tensors that no argument can change, once."""

from __future__ import annotations

import pytest
import torch
from programs import assert_same, trace_of

import tessera
from tessera.ir.interp import run
from tessera.passes.clean.fold import LIMIT, fold


def left(fn, *args):
    trace = trace_of(fn, *args)
    after = fold(trace)
    assert_same(trace, after, *args)
    return [eqn.op._opname for eqn in after.equations], after


def test_small_tables():
    ops, after = left(lambda x: x * (torch.arange(4) * 2 + 1).float(), torch.randn(4))
    assert ops == ["mul"]
    (table,) = after.constants.values()
    assert table.tolist() == [1, 3, 5, 7]


def test_closed_over_tensors_may_change():
    scale = torch.tensor([2.0, 3.0])
    trace = trace_of(lambda x: x * (scale + 1), torch.randn(2))
    after = fold(trace)
    scale.fill_(9.0)
    assert run(after, torch.ones(2))[0].tolist() == [10, 10]


def test_literals():
    assert left(lambda x: x * torch.tensor([1.0, 2.0]), torch.randn(2))[0] == ["mul"]
    assert left(lambda x: x * torch.tensor(list(range(2000))), torch.randn(2000))[0] == ["detach", "mul"]
    assert left(lambda x: torch.tensor([1.0, 2.0]), torch.randn(2))[0][0] == "lift_fresh_copy"
    ops, _ = left(lambda x: x + torch.tensor([1.0, 2.0]).exp(), torch.randn(2))
    assert ops == ["add"]


def test_what_the_caller_gets_is_fresh():
    ops, after = left(lambda x: (torch.arange(3), x + torch.arange(3)), torch.randn(3))
    assert ops.count("arange") == 1 and after.outputs[0] not in after.constants
    assert left(lambda x: (torch.arange(4) + 1).reshape(2, 2), torch.randn(1))[0][0] == "arange"


def _written_eye(x):
    return torch.eye(2).triu_()


def _written_literal(x):
    part = torch.tensor([1.0, 2.0])[0:2]
    part[1:] = part[:-1].clone()
    return part


def _written_data(x):
    y = x * 2
    y.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    return y, y.view(3, 1)


@pytest.mark.parametrize("fn", [_written_eye, _written_literal, _written_data])
def test_what_was_written_is_fresh_too(fn):
    """Once nothing is differentiated, the copies that keep a history apart are dropped: none may show a constant."""
    fast, x = tessera.jit(fn), torch.ones(3)
    for _ in range(3):
        got, expected = fast(x), fn(x)
        torch.testing.assert_close(got, expected)
        (got[0] if isinstance(got, tuple) else got).add_(1)


def test_not_folded():
    assert left(lambda x: x + torch.arange(LIMIT + 1), torch.randn(1))[0][0] == "arange"
    assert left(lambda x: x + torch.zeros(8), torch.randn(8))[0][0] == "zeros"
    assert "rand" in left(lambda x: x + torch.rand(2) * torch.arange(2), torch.randn(2))[0]
    assert left(lambda x: x + 1, torch.randn(2))[0] == ["add"]


def test_mutated_input_may_hold_a_constant():
    def fn(x):
        x.copy_(torch.arange(4.0) + 1)

    assert left(fn, torch.randn(4))[0] in (["copy"], [])


def test_a_folded_view_keeps_its_strides():
    """What is expanded stays so: kernels were made for a constant with these strides."""

    def f(x):
        row = torch.arange(4.0).reshape(1, 4)
        return x * row.expand(3, 4), torch.arange(8.0)[::2] + x[0]

    fast = tessera.jit(f, strict=True)
    x = torch.randn(3, 4)
    for found, wanted in zip(fast(x), f(x), strict=True):
        torch.testing.assert_close(found, wanted)
    for stage in tessera.stages(fast):
        for v, tensor in stage.trace.constants.items():
            assert tensor.stride() == tuple(v.type.stride), (stage.name, v)


def test_quantile():
    x = torch.randn(3, 5)
    fast = tessera.jit(lambda x: torch.quantile(x, 0.5, dim=0), strict=True)
    torch.testing.assert_close(fast(x), torch.quantile(x, 0.5, dim=0))
