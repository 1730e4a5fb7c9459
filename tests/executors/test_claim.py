"""Who runs what: operator and fusion executors, priorities, the report."""

from __future__ import annotations

from zlib import crc32

import pytest
import torch
from programs import assert_same, random_program, trace_of

from tessera.executors.base import FusionExecutor, OperatorExecutor, in_order
from tessera.executors.claim import claim
from tessera.executors.regions import partition
from tessera.ir.equation import Special
from tessera.ir.interp import run
from tessera.ir.lifetimes import lifetimes
from tessera.ir.printer import compile_trace
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.passes.memory.reinplace import reinplace
from tessera.passes.memory.schedule import schedule
from tessera.util.errors import OptionError


def by_interpreting(body):
    return lambda *args: tuple(run(body, *args))


def opname(eqn):
    return getattr(eqn.op, "_opname", "")


def fusion(name, wanted, least=1):
    return FusionExecutor(name, lambda trace: partition(trace, wanted, least), by_interpreting)


def test_operator_executor():
    calls = []

    def my_relu(x):
        calls.append(x.shape)
        return x.clamp(min=0)

    mine = OperatorExecutor("mine", lambda eqn: my_relu if opname(eqn) == "relu" else None, lambda eqn: "faster")
    trace = trace_of(lambda x: x.relu().exp().relu(), torch.randn(3))
    after, report = claim(trace, [mine, "aten"])
    assert_same(trace, after, torch.randn(3))
    assert len(calls) == 2 and after.equations[0].op is after.equations[2].op
    assert "mine.relu" in str(after)
    assert [(c.executor, c.operators, c.why) for c in report] == [
        ("mine", ("aten.relu", "aten.relu"), "faster"),
        ("aten", ("aten.exp",), ""),
    ]


def test_first_in_the_list_wins():
    first = OperatorExecutor("first", lambda eqn: torch.relu if opname(eqn) == "relu" else None)
    second = OperatorExecutor("second", lambda eqn: torch.exp if opname(eqn) == "exp" else torch.relu)
    _, report = claim(trace_of(lambda x: x.relu().exp(), torch.randn(3)), [first, second])
    assert [c.executor for c in report] == ["first", "second"]


def test_fusion_executor_keeps_the_body():
    pointwise = fusion("toy", lambda eqn: opname(eqn) in ("exp", "sin", "mul"))
    trace = trace_of(lambda x, w: (x.exp() * 2).sin() @ w + w.exp(), torch.randn(3, 3), torch.randn(3, 3))
    after, report = claim(trace, [pointwise, "aten"])
    fused = [eqn for eqn in after.equations if isinstance(eqn.op, Special)]
    assert [len(eqn.op.body.equations) for eqn in fused] == [3, 1]
    assert fused[0].op.body.inputs == (trace.inputs[0],)
    assert_same(trace, after, torch.randn(3, 3), torch.randn(3, 3))
    compiled = compile_trace(after)
    assert_same(trace, after, *[torch.randn(3, 3)] * 2, runner=lambda _, *xs: compiled(*xs))
    assert [c.executor for c in report] == ["toy", "toy", "aten"]


def test_a_refused_region_goes_on():
    shy = FusionExecutor("shy", lambda t: partition(t, lambda e: True), lambda body: None)
    trace = trace_of(lambda x: x.exp().sin(), torch.randn(3))
    after, report = claim(trace, [shy])
    assert after is trace and [c.executor for c in report] == ["aten"]


def test_regions_are_convex():
    """exp and add may not be one region: the path between them leaves it."""
    trace = trace_of(lambda x, w: (y := x.exp()) + y @ w, torch.randn(3, 3), torch.randn(3, 3))
    regions = partition(trace, lambda eqn: opname(eqn) != "matmul")
    assert [len(r) for r in regions] == [1, 1]


def test_two_regions_that_would_need_each_other():
    def fn(a, b, w):
        p, q = a.exp(), b.sin()
        return p + q @ w, q * (p @ w)

    trace = trace_of(fn, *[torch.randn(3, 3)] * 3)
    after, _ = claim(trace, [fusion("toy", lambda eqn: opname(eqn) != "matmul")])
    assert_same(trace, after, *[torch.randn(3, 3) for _ in range(3)])


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("final", [False, True], ids=["functional", "in_place"])
def test_random_regions(seed, final):
    """Fusing any half of the operators keeps values, writes and the order of random numbers."""
    program, args = random_program(seed, length=20)
    trace = dce(cse(canonicalise(trace_of(program, *args))))
    if final:
        trace = reinplace(schedule(trace))
    some = fusion("some", lambda eqn: crc32(f"{opname(eqn)} {seed}".encode()) % 2 == 0)
    rest = fusion("rest", lambda eqn: not opname(eqn).startswith("a"), least=2)
    after, report = claim(trace, [some, rest, "aten"])
    assert_same(trace, after, *args)
    if not final:
        last = reinplace(schedule(after))
        compiled = compile_trace(last, dead=lifetimes(last))
        assert_same(trace, last, *args, runner=lambda _, *xs: compiled(*xs))
    named = [name for c in report for name in c.results]
    assert sorted(named) == sorted(v.name for eqn in trace.equations for v in eqn.results())


def test_symbolic_sizes_reach_regions():
    trace = trace_of(lambda x: (x + x.shape[0]).exp().reshape(-1, x.shape[0]) * 2, torch.randn(4, 6), dynamic=(0,))
    after, _ = claim(trace, [fusion("toy", lambda eqn: True)])
    assert len(after.equations) == 1
    for n in (2, 5):
        assert_same(trace, after, torch.randn(n, 6))


def test_unknown_executor():
    with pytest.raises(OptionError, match="unknown executor 'nobody'; there are .*aten"):
        in_order(["nobody"])


def test_views_of_small_tensors_are_made_inside_a_region():
    def program(x, w):
        wide = w.unsqueeze(0)
        return (x * wide).exp(), (x.sum(0) + w).sin() * wide

    trace = trace_of(program, torch.randn(4, 3), torch.randn(3))
    toy = fusion("toy", lambda eqn: opname(eqn) in ("exp", "sin", "mul"), 2)
    after, _ = claim(trace, [toy, "aten"])
    assert_same(trace, after, torch.randn(4, 3), torch.randn(3))
    assert "unsqueeze" not in [opname(eqn) for eqn in after.equations]
    bodies = [eqn.op.body for eqn in after.equations if isinstance(eqn.op, Special)]
    assert bodies and all("unsqueeze" in str(body) for body in bodies)


def test_a_view_that_is_a_result_stays():
    trace = trace_of(lambda w: ((w.unsqueeze(0) * 2).exp(), w.unsqueeze(0)), torch.randn(3))
    toy = fusion("toy", lambda eqn: opname(eqn) in ("exp", "mul"), 2)
    after, _ = claim(trace, [toy, "aten"])
    assert_same(trace, after, torch.randn(3))


def test_a_region_that_refuses_views_gets_them_made():
    def compile(body):
        return None if any(opname(e) == "unsqueeze" for e in body.equations) else by_interpreting(body)

    picky = FusionExecutor("picky", lambda trace: partition(trace, lambda e: opname(e) in ("exp", "mul"), 2), compile)
    trace = trace_of(lambda x, w: (x * w.unsqueeze(0)).exp(), torch.randn(4, 3), torch.randn(3))
    after, _ = claim(trace, [picky, "aten"])
    assert_same(trace, after, torch.randn(4, 3), torch.randn(3))
    assert [opname(eqn) for eqn in after.equations][0] == "unsqueeze" and len(after.equations) == 2


def test_views_that_another_region_makes_are_not_taken_apart():
    """Of a region only what others read leaves it: here the view, not what it shows."""

    def program(x, y):
        view = x.exp().sin().unsqueeze(0)
        return (y @ y.t()).sum() * 0 + (view * y).cos()

    trace = trace_of(program, torch.randn(3), torch.randn(4, 3))
    index = {opname(eqn): i for i, eqn in enumerate(trace.equations)}
    regions = [sorted(index[n] for n in names) for names in (("exp", "sin", "unsqueeze"), ("cos",))]
    toy = FusionExecutor("toy", lambda _: regions, by_interpreting)
    after, _ = claim(trace, [toy, "aten"])
    assert_same(trace, after, torch.randn(3), torch.randn(4, 3))
    muls = [i for i, eqn in enumerate(trace.equations) if opname(eqn) == "mul"]
    regions[1] = sorted([muls[-1], index["cos"]])
    after, _ = claim(trace, [toy, "aten"])
    assert_same(trace, after, torch.randn(3), torch.randn(4, 3))
