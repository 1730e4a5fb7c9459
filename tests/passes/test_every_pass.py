"""Every pass, alone and after the others, keeps the values of random programs that view, write and repeat."""

from __future__ import annotations

import functools

import pytest
import torch
from programs import assert_same, random_program, trace_of

from tessera.executors.aten import bind
from tessera.ir.lifetimes import lifetimes
from tessera.ir.printer import compile_trace
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.passes.clean.fold import fold
from tessera.passes.memory.reinplace import reinplace
from tessera.passes.memory.schedule import peak_memory, schedule

forget_grad = functools.partial(canonicalise, differentiable=False)
PASSES = [canonicalise, forget_grad, fold, cse, dce, schedule, reinplace]


@pytest.mark.parametrize("seed", range(40))
def test_each_pass_alone(seed):
    program, args = random_program(seed)
    trace = trace_of(program, *args)
    for step in PASSES:
        assert_same(trace, step(trace), *args)


@pytest.mark.parametrize("seed", range(100, 160))
def test_one_after_the_other(seed):
    program, args = random_program(seed, length=20)
    first = trace = trace_of(program, *args)
    for step in PASSES:
        after = step(trace)
        assert_same(trace, after, *args)
        if step is schedule:
            assert peak_memory(after) <= peak_memory(trace)
        trace = after
    compiled = compile_trace(trace, bind=bind, dead=lifetimes(trace))
    assert_same(first, trace, *args, runner=lambda _, *xs: compiled(*xs))


@pytest.mark.parametrize("seed", range(8))
def test_names_stay(seed):
    """A value that is still there after a pass has the name and type it had."""
    program, args = random_program(seed)
    trace = trace_of(program, *args)
    for step in PASSES[:-1]:
        after = step(trace)
        types = {v.name: v.type for v in trace.values()}
        assert all(types[v.name] == v.type for v in after.values() if v.name in types)
        trace = after


@pytest.mark.parametrize("n", [2, 5])
def test_symbolic_sizes(n):
    def program(x, cache):
        cache[: x.shape[0]] = x * 1
        y = (x + x.shape[0]).reshape(x.shape[0], 2, 2).reshape(x.shape[0], 4)
        return y.clone().relu() + (x + x.shape[0]), cache.sum()

    trace = trace_of(program, torch.randn(3, 4), torch.zeros(8, 4), dynamic=(0,))
    final = functools.reduce(lambda t, step: step(t), PASSES, trace)
    assert_same(trace, final, torch.randn(n, 4), torch.zeros(8, 4))
    assert not final.mutations


def test_sizes_known_at_run_time():
    def program(x):
        where = torch.nonzero(x)
        return torch.zeros(where.shape[0]) + 1, x.exp().exp()

    trace = trace_of(program, torch.ones(6), dynamic=(0,))
    final = functools.reduce(lambda t, step: step(t), PASSES, trace)
    assert_same(trace, final, torch.tensor([0.0, 2.0, 0.0, 3.0]))
