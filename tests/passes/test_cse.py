"""cse merges equal equations, and only where nobody can tell."""

from __future__ import annotations

import torch
from programs import assert_same, trace_of

import tessera
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.transforms.vjp import vjp


def names(trace):
    return [eqn.op._opname for eqn in trace.equations]


def test_equal_equations_are_one():
    trace = trace_of(lambda x: x.exp() * x.exp() + (x.exp() * x.exp()).sum(), torch.randn(3))
    after = cse(trace)
    assert names(after) == ["exp", "mul", "sum", "add"]
    assert_same(trace, after, torch.randn(3))


def test_numbers_count_with_kind_and_sign():
    trace = trace_of(lambda x: (x * 1 + x * 1.0 + x * True) + (x / 0.0 + x / -0.0), torch.randn(3))
    assert names(cse(trace)).count("mul") == 3 and names(cse(trace)).count("div") == 2


def test_random_operators_are_not_merged():
    assert names(cse(trace_of(lambda x: torch.rand(3) - torch.rand(3) + x, torch.ones(3)))).count("rand") == 2


def test_tags_are_not_mixed():
    def fn(x):
        with torch.no_grad():
            a = x.exp()
        return a + x.exp()

    assert names(cse(trace_of(fn, torch.randn(3)))).count("exp") == 2


def test_outputs_stay_separate_memory():
    trace = trace_of(lambda x: (x.exp(), x.exp(), x.exp() + 1), torch.randn(3))
    after = cse(trace)
    assert names(after) == ["exp", "exp", "add"]
    assert after.outputs[0] is not after.outputs[1]
    views = trace_of(lambda x: (x.exp().t(), x.exp().t()), torch.randn(3, 3))
    assert len(set(cse(views).outputs)) == 2 and names(cse(views)).count("exp") == 2


def test_views_are_merged():
    trace = trace_of(lambda x: x.t().exp() + x.t().sin(), torch.randn(3, 3))
    assert names(dce(cse(trace))).count("t") == 1


def test_gradients_do_not_read_what_the_caller_may_have_written():
    trace = trace_of(lambda x, y: (x / y, x.exp() + x.exp()), torch.randn(3), torch.randn(3))
    joint = vjp(trace, list(trace.inputs)).trace
    after = cse(joint)
    quotients = [eqn for eqn in after.equations if eqn.op._opname == "div"]
    assert any(eqn.out is after.outputs[0] for eqn in quotients)
    assert all(after.outputs[0] not in eqn.inputs() for eqn in after.equations)
    assert names(after).count("exp") == 1  # no output: it is computed once for both


def test_gradients_do_not_read_an_output_in_place_of_its_twin():
    def program(x):
        given, mine = x.sigmoid(), x.sigmoid()
        return given, mine * mine, x.cos() + x.cos()

    x = torch.randn(3, requires_grad=True)
    trace = trace_of(program, x.detach())
    clean = cse(trace, wrt=trace.inputs)
    assert names(clean).count("sigmoid") == 2 and names(clean).count("cos") == 1
    assert names(cse(trace)).count("sigmoid") == 1  # no derivative follows
    after = cse(vjp(clean, list(trace.inputs)).trace)
    assert all(after.outputs[0] not in eqn.inputs() for eqn in after.equations if eqn.source.note == "grad of mul")

    def grad_after_a_write(f):
        first, second, _ = f(x)
        with torch.no_grad():
            first.mul_(2)
        return torch.autograd.grad(second.sum(), x)[0]

    torch.testing.assert_close(grad_after_a_write(tessera.jit(program)), grad_after_a_write(program))
