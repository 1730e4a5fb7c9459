"""dce drops what nothing needs and keeps effects."""

from __future__ import annotations

import torch
from programs import trace_of

from tessera.passes.clean.dce import dce


def names(trace):
    return [eqn.op._opname for eqn in trace.equations]


def test_dead_equations_and_constants_go():
    def fn(x):
        x.exp() + torch.tensor([1.0, 2.0])
        return x.sin()

    trace = dce(trace_of(fn, torch.randn(2)))
    assert names(trace) == ["sin"] and not trace.constants


def test_random_operators_and_assertions_stay():
    def fn(x):
        torch.rand(3)
        torch._assert_async((x > 0).any())
        return x * 2

    assert names(dce(trace_of(fn, torch.randn(2)))) == ["rand", "gt", "any", "_assert_async", "mul"]


def test_mutations_stay():
    trace = dce(trace_of(_bump, torch.randn(2)))
    assert names(trace) == ["add"] and list(trace.mutations) == [trace.inputs[0]]


def _bump(x):
    x.add_(1)


def test_maker_of_a_size_stays():
    trace = dce(trace_of(lambda x: torch.ones(torch.nonzero(x).shape[0]), torch.ones(4), dynamic=(0,)))
    assert "nonzero" in names(trace)


def test_nothing_to_do_is_the_same_trace():
    trace = trace_of(lambda x: x + 1, torch.randn(2))
    assert dce(trace) is trace
