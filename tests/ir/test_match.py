"""Patterns and the rewrite driver."""

from __future__ import annotations

import torch
from programs import assert_same, trace_of

from tessera.ir.builder import aten
from tessera.ir.match import P, Table, Var, match, rewrite

x, y = Var("x"), Var("y")


def names(trace):
    return [eqn.op._opname for eqn in trace.equations]


def test_captures_and_literals():
    trace = trace_of(lambda a, b: torch.add(a * 2, b, alpha=3), torch.ones(2), torch.ones(2))
    made = {v: e for e in trace.equations for v in e.results()}
    add = trace.equations[-1]
    found = match(P("aten.add", P("aten.mul", x, 2), y, alpha=3), add, made)
    assert found is not None and found.captures == {"x": trace.inputs[0], "y": trace.inputs[1]}
    assert match(P("aten.add", P("aten.mul", x, 2.0), y, alpha=3), add, made) is None  # another kind of number
    assert match(P("aten.add", x, y), add, made) is None  # alpha is not in the pattern
    assert match(P("aten.add", x, ...), add, made) is not None
    assert match(P("aten.add", x, x, ...), add, made) is None  # two different values


def test_one_overload():
    trace = trace_of(lambda a: a.sum(0).sum(), torch.ones(2, 2))
    table = Table([(P("aten.sum.dim_IntList", x, y), lambda x, y: aten.mul(aten.mean(x, y), 2))])
    assert names(rewrite(trace, table)) == ["mean", "mul", "sum"]


def test_replacement_keeps_name_and_source():
    trace = trace_of(lambda a: torch.square(a) + 1, torch.randn(3))
    table = Table([(P("aten.square", x), lambda x: aten.mul(x, x)), (P("aten.pow", x, 2), lambda x: aten.mul(x, x))])
    after = rewrite(trace, table)
    assert names(after) == ["mul", "add"]
    assert after.equations[0].out.name == trace.equations[0].out.name
    assert after.equations[0].source == trace.equations[0].source
    assert_same(trace, after, torch.randn(3))


def test_fixed_point_sees_rewritten_producers():
    trace = trace_of(lambda a: a.neg().neg().neg().neg() + 1, torch.randn(3))
    after = rewrite(trace, Table([(P("aten.neg", P("aten.neg", x)), lambda x: x)]))
    assert after.equations[-1].args[0] is trace.inputs[0]


def test_other_type_is_taken_back():
    trace = trace_of(lambda a: a + 1, torch.randn(3))
    assert rewrite(trace, Table([(P("aten.add", x, y), lambda x, y: aten._to_copy(x, dtype=torch.float64))])) is trace
    assert rewrite(trace, Table([(P("aten.add", x, y), lambda x, y: None)])) is trace


def test_side_condition_and_no_grad():
    def fn(a):
        with torch.no_grad():
            b = -a
        return -b

    trace = trace_of(fn, torch.randn(3))
    double = P("aten.neg", P("aten.neg", x))
    assert rewrite(trace, Table([(double, lambda x: x)])) is trace  # the two have different tags
    plain = trace_of(lambda a: a.neg().neg(), torch.randn(3))
    assert rewrite(plain, Table([(double, lambda x: x, lambda m: False)])) is plain


def test_tables_add():
    both = Table([(P("aten.neg", x), lambda x: aten.mul(x, -1))]) + Table([(P("aten.exp", x), lambda x: aten.exp2(x))])
    assert names(rewrite(trace_of(lambda a: (-a).exp(), torch.randn(2)), both)) == ["mul", "exp2"]
