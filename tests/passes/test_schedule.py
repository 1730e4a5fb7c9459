"""schedule, lifetimes and peak_memory."""

from __future__ import annotations

import torch
from programs import assert_same, trace_of

from tessera.ir.lifetimes import lifetimes
from tessera.passes.memory.reinplace import reinplace
from tessera.passes.memory.schedule import peak_memory, schedule


def test_peak_counts_what_lives_at_once():
    trace = trace_of(lambda x: x.exp().sin().cos(), torch.randn(256))
    assert peak_memory(trace) == 2 * 1024
    assert peak_memory(trace_of(lambda x: x.exp().view(16, 16).t().sin(), torch.randn(256))) == 2 * 1024
    assert peak_memory(trace_of(lambda x: x.t(), torch.randn(4, 4))) == 0


def test_wide_programs_shrink():
    def fn(x):
        wide = [x.repeat(64) * i for i in range(6)]
        return sum(w.sum() for w in wide)

    trace = trace_of(fn, torch.randn(64))
    after = schedule(trace)
    assert peak_memory(after) < peak_memory(trace) / 1.5
    assert_same(trace, after, torch.randn(64))


def test_an_order_is_judged_with_what_dies_in_it():
    """Small results first would hold all that is owned; one after the other, each is freed before the next is read."""

    def fn(a, b, c):
        return tuple(x.exp().view(4, 64).sum(1) for x in (a, b, c))

    trace = trace_of(fn, *(torch.randn(256) for _ in range(3)))
    after = schedule(trace, trace.inputs)
    assert peak_memory(after, trace.inputs) <= peak_memory(trace, trace.inputs)
    assert_same(trace, after, *(torch.randn(256) for _ in range(3)))


def test_effects_keep_their_order():
    trace = trace_of(lambda x: (torch.rand(64) * x.sum(), torch.rand(2), torch.rand(64).sum()), torch.randn(64))
    order = [eqn.out.name for eqn in schedule(trace).equations if eqn.op._opname == "rand"]
    assert order == ["rand", "rand_1", "rand_2"]


def test_lifetimes():
    trace = trace_of(lambda x: ((x + 1) * (x + 1).exp(), x.sin())[0], torch.randn(3))
    dead = lifetimes(trace)
    gone = [v for values in dead.values() for v in values]
    assert set(gone) == {v for eqn in trace.equations for v in eqn.results()} - set(trace.outputs)
    for index, values in dead.items():
        assert not any(v in eqn.inputs() for v in values for eqn in trace.equations[index + 1 :])
    assert trace.inputs[0] in [v for values in lifetimes(trace, inputs=True).values() for v in values]


def test_a_cache_write_stays_in_place():
    """Reordering must not move a read of the old contents behind the write."""

    def fn(cache, k):
        before = (cache * 2).sum()
        cache[1] = k
        return before, (cache * 3).sum()

    trace = trace_of(fn, torch.randn(8, 64), torch.randn(64))
    assert not reinplace(schedule(trace)).mutations
