"""The one rewriter: what it keeps, what it refuses, how it names."""

from __future__ import annotations

import torch
from programs import assert_same, trace_of

from tessera.ir.builder import aten
from tessera.ir.rewrite import Rewrite, named, needed


def ops(trace):
    return [eqn.op._opname for eqn in trace.equations]


def of(rewrite, name):
    return [eqn for eqn in rewrite.trace.equations if eqn.op._opname == name]


def test_a_walk_that_changes_nothing_gives_the_trace_back():
    trace = trace_of(lambda a: (a + 1).exp(), torch.randn(3))
    rewrite = Rewrite(trace)
    assert [eqn.op._opname for eqn in rewrite] == ["add", "exp"]
    assert rewrite.finish() is trace


def test_replacements_keep_name_source_and_tags():
    def fn(a):
        with torch.no_grad():
            b = torch.square(a)
        return b + 1

    trace = trace_of(fn, torch.randn(3))
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        if len(eqn.inputs()) == 1 and eqn.op._opname in ("square", "pow"):
            assert rewrite.replace(eqn, lambda eqn: aten.mul(aten.neg(aten.neg(eqn.args[0])), eqn.args[0]))
    after = rewrite.finish()
    assert ops(after) == ["neg", "neg", "mul", "add"]
    old, new = trace.equations[0], after.equations[2]
    assert new.out is old.out and new.source == old.source
    assert all(eqn.tags == old.tags != frozenset() for eqn in after.equations[:3])
    assert len({v.name for v in after.values()}) == len(list(after.values()))
    assert_same(trace, after, torch.randn(3))


def test_what_has_another_type_is_taken_back():
    trace = trace_of(lambda a: a + 1, torch.randn(3))
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        assert not rewrite.replace(eqn, lambda eqn: aten._to_copy(eqn.args[0], dtype=torch.float64))
        assert not rewrite.replace(eqn, lambda eqn: eqn.args[0])  # nothing was emitted that could have the name
        assert not rewrite.replace(eqn, lambda eqn: aten.neg(eqn.args[0]) and None)
        assert rewrite.equations == []
    assert rewrite.finish() is trace


def test_an_error_leaves_nothing_behind():
    rewrite = Rewrite(trace_of(lambda a: a + 1, torch.randn(3)))

    def fails(eqn):
        aten.neg(eqn.args[0])
        raise RuntimeError("no")

    for eqn in rewrite:
        try:
            rewrite.replace(eqn, fails)
        except RuntimeError:
            assert rewrite.equations == []
    assert rewrite.finish() is rewrite.trace


def test_renamed_values_are_renamed_everywhere():
    def fn(a, b):
        c = a.neg().neg()
        b.copy_(c)
        return c, c * 2

    trace = trace_of(fn, torch.randn(3), torch.randn(3))
    rewrite = Rewrite(trace)
    first, second = of(rewrite, "neg")
    for eqn in rewrite:
        if eqn is second:
            rewrite.rename(eqn.out, first.args[0])
    after = rewrite.finish()
    assert "neg" in ops(after) and second.out not in list(after.values())
    assert all(second.out not in eqn.inputs() for eqn in after.equations)
    assert after.outputs[0] is trace.inputs[0]
    assert_same(trace, after, torch.randn(3), torch.randn(3))


def test_copies_come_before_and_have_fresh_names():
    trace = trace_of(lambda a: a.neg().exp(), torch.randn(3))
    rewrite = Rewrite(trace)
    (neg,) = of(rewrite, "neg")
    for eqn in rewrite:
        if eqn.op._opname == "exp":
            own = rewrite.copy(neg)
            assert own.out is not neg.out and own.source == neg.source
            rewrite.keep(eqn.substitute({neg.out: own.out}))
    after = rewrite.finish()
    assert ops(after) == ["neg", "neg", "exp"]
    assert after.equations[2].args[0] is after.equations[1].out
    assert_same(trace, after, torch.randn(3))


def test_erase_and_needed():
    trace = trace_of(lambda a: (a.neg(), a.exp() + 1)[1], torch.randn(3))
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        if eqn.op._opname == "neg":
            rewrite.erase()
    after = rewrite.finish()
    assert ops(after) == ["exp", "add"]
    assert needed(trace.equations, trace.results()) == list(after.equations)


def test_questions_about_the_trace():
    rewrite = Rewrite(trace_of(lambda a: a.neg().exp() + 1, torch.randn(3)))
    (neg,), (exp,) = of(rewrite, "neg"), of(rewrite, "exp")
    (add,) = of(rewrite, "add")
    assert rewrite.maker(exp.args[0], "neg", "abs") is neg and rewrite.maker(exp.args[0], "abs") is None
    assert rewrite.maker(3, "neg") is None
    assert rewrite.reader(neg.out) is exp and rewrite.reader(add.out) is None


def test_named_refuses_one_value_under_two_names():
    trace = trace_of(lambda a: a.neg(), torch.randn(3))
    (eqn,) = trace.equations
    other = trace_of(lambda a: a.exp(), torch.randn(3)).equations[0].out
    assert named(trace.equations, [other], [eqn.out])[0].out is other
    assert named(trace.equations, [other, eqn.out], [eqn.out, eqn.out]) is None
    assert named(trace.equations, [other], [None]) is None
