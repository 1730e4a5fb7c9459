"""Which regions share a launch: equal forms, no path between them, not too much memory held."""

from __future__ import annotations

import torch
from programs import trace_of

from tessera.passes.fuse import horizontal as module
from tessera.passes.fuse.horizontal import horizontal


def regions_of(trace):
    return [[i] for i in range(len(trace.equations))]


def test_independent_regions_of_one_form():
    trace = trace_of(lambda a, b: [a.exp(), b.sin(), b.exp()], torch.randn(4), torch.randn(8))
    assert horizontal(trace, regions_of(trace), ["exp", "sin", "exp"]) == [[0, 2]]
    assert horizontal(trace, regions_of(trace), ["exp", "sin", None]) == []


def test_a_path_keeps_them_apart():
    trace = trace_of(lambda a: [a.exp().sin().exp()], torch.randn(4))
    assert horizontal(trace, regions_of(trace), ["exp", None, "exp"]) == []
    assert horizontal(trace, regions_of(trace)[:2], ["exp", "exp"]) == []


def test_two_launches_that_would_wait_for_each_other():
    trace = trace_of(lambda a, b: [a.exp().sin(), b.sin().exp()], torch.randn(4), torch.randn(4))
    names = [eqn.op._opname for eqn in trace.equations]
    assert len(horizontal(trace, regions_of(trace), names)) == 1


def test_a_launch_is_closed_once_it_holds_much(monkeypatch):
    xs = [torch.randn(100) for _ in range(6)]
    trace = trace_of(lambda *a: [x.exp() for x in a], *xs)
    monkeypatch.setattr(module, "HELD", 800)
    assert horizontal(trace, regions_of(trace), ["exp"] * 6) == [[0, 1], [2, 3], [4, 5]]
    monkeypatch.setattr(module, "MANY", 800)
    assert horizontal(trace, regions_of(trace), ["exp"] * 6) == []
