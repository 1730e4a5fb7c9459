"""A user's operators and executors, in a few lines each."""

from __future__ import annotations

import itertools

import pytest
import torch
from programs import assert_same, trace_of

from tessera.executors.claim import claim
from tessera.executors.register import register_executor, register_operator, schema_text, unregister_executor
from tessera.ir.interp import run
from tessera.ir.verify import verify
from tessera.transforms.vjp import vjp
from tessera.util.errors import OptionError, RuleError

counter = itertools.count()


def fresh(name):
    return f"{name}_{next(counter)}"


def swish(x, beta=1.0):
    return torch.from_numpy(x.numpy() / (1 + (-beta * x).exp().numpy()))  # opaque to PyTorch


def swish_vjp(ct, y, x, beta):
    s = torch.sigmoid(beta * x)
    return ct * (s + beta * x * s * (1 - s)), None


def reference(x, beta=1.0):
    return x * torch.sigmoid(beta * x)


X = torch.randn(4, 3)


def gradient(fn, x):
    trace = trace_of(lambda x: fn(x).sum(), x)
    joint = vjp(trace, list(trace.inputs))
    verify(joint.trace)
    return run(joint.trace, x, torch.ones(()))[-1]


def test_operator_stays_whole_and_differentiates():
    op = register_operator(fresh("swish"), swish, like=0, vjp=swish_vjp)
    trace = trace_of(lambda x: op(x * 2, 1.5) + 1, X)
    assert [eqn.op._opname for eqn in trace.equations] == ["mul", op._opname, "add"]
    torch.testing.assert_close(run(trace, X)[0], reference(X * 2, 1.5) + 1)
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(reference(x, 1.5).sum(), x)
    torch.testing.assert_close(gradient(lambda x: op(x, 1.5), X), expected)


def test_operator_trains_in_eager_too():
    op = register_operator(fresh("swish"), swish, like="aten.silu", vjp=swish_vjp)
    x = X.clone().requires_grad_()
    (got,) = torch.autograd.grad(op(x).sum(), x)
    (expected,) = torch.autograd.grad(reference(x).sum(), x)
    torch.testing.assert_close(got, expected)


def test_type_from_fake_and_by_running():
    def double_rows(x: torch.Tensor, times: int = 2) -> torch.Tensor:
        return x.repeat(times, 1)

    by_running = register_operator(fresh("rows"), double_rows)
    by_fake = register_operator(
        fresh("rows"), double_rows, fake=lambda x, times=2: x.new_empty(x.shape[0] * times, x.shape[1])
    )
    for op in (by_running, by_fake):
        trace = trace_of(lambda x, op=op: op(x, 3), X)
        assert trace.outputs[0].shape == (12, 3)
        assert torch.equal(run(trace, X)[0], X.repeat(3, 1))


def test_several_results():
    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clamp(min=0), x.clamp(max=0)

    op = register_operator(fresh("split"), split, vjp=lambda cts, ys, x: (cts[0] * (x > 0) + cts[1] * (x < 0),))
    trace = trace_of(lambda x: op(x)[0] - op(x)[1], X)
    assert torch.equal(run(trace, X)[0], X.abs())
    torch.testing.assert_close(gradient(lambda x: op(x)[0] - op(x)[1], X), X.sign())


def test_own_namespace_and_twice():
    name = fresh("mine::thing")
    op = register_operator(name, lambda x: x + 1)
    assert op.namespace == "mine"
    with pytest.raises(OptionError, match="registered already"):
        register_operator(name, lambda x: x + 1)


def test_a_type_that_cannot_be_found():
    op = register_operator(fresh("opaque"), swish)
    with pytest.raises(Exception, match="register it with fake= or like="):
        trace_of(lambda x: op(x), X)


def test_schema():
    def fn(a, b: torch.Tensor | None, n: int, *, s: float = 0.5, flag=True, mode="x", sizes: list[int] = ()): ...

    assert schema_text(lambda x, beta=1.0: x) == "(Tensor x, float beta=1.0) -> Tensor"
    assert schema_text(fn).startswith('(Tensor a, Tensor? b, int n, *, float s=0.5, bool flag=True, str mode="x"')
    with pytest.raises(OptionError, match="fixed list of parameters"):
        schema_text(lambda *xs: xs)


@pytest.fixture
def name():
    made = fresh("executor")
    yield made
    unregister_executor(made)


def test_executor_in_one_line(name):
    register_executor(name, {"aten.gelu": lambda x, approximate="none": x * 0})
    trace = trace_of(lambda x: torch.nn.functional.gelu(x) + 1, X)
    after, report = claim(trace, ["aten"])
    assert report[0].executor == name and torch.equal(run(after, X)[0], torch.ones_like(X))


def test_executor_that_looks_first(name):
    register_executor(name, {"aten.exp": lambda eqn: torch.exp if eqn.args[0].ndim == 2 else None})
    trace = trace_of(lambda x: x.exp().sum(0).exp(), X)
    after, report = claim(trace, ["sdpa", "aten"])
    assert report[0].results == ("exp",) and report[0].executor == name
    assert_same(trace, after, X)


def test_priority_and_place(name):
    other, last = fresh("executor"), fresh("executor")
    register_executor(name, {"aten.exp": torch.exp})
    register_executor(other, {"aten.exp": torch.exp}, priority=5)
    register_executor(last, {"aten.exp": torch.exp, "aten.sin": torch.sin}, before="aten")
    try:
        _, report = claim(trace_of(lambda x: x.exp().sin(), X), ["sdpa", "aten"])
        assert [c.executor for c in report] == [other, last]
    finally:
        unregister_executor(other)
        unregister_executor(last)


def test_executor_with_its_own_derivative():
    made = fresh("executor")
    before = gradient(torch.sin, X)
    register_executor(made, {"aten.sin": torch.sin}, vjp={"aten.sin": lambda ct, y, x: (ct * 7,)})
    try:
        assert torch.equal(gradient(torch.sin, X), torch.full_like(X, 7))
    finally:
        unregister_executor(made)
    assert torch.equal(gradient(torch.sin, X), before)


def test_mistakes_are_told():
    with pytest.raises(OptionError, match="expected an operator name"):
        register_executor("wrong", {"gelu": torch.nn.functional.gelu})
    with pytest.raises(OptionError, match="registered already"):
        register_executor("aten", {"aten.exp": torch.exp})


def test_a_gradient_too_many_is_told():
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice = register_operator("gradient_too_many", doubled, like=0, vjp=lambda ct, y, x: (ct * 2, ct))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuleError, match="expected the vjp to give 1 gradients, one an argument, got 2"):
        twice(x).sum().backward()
    trace = trace_of(lambda x: twice(x), torch.ones(3))
    with pytest.raises(RuleError, match="expected the vjp to give 1 gradients, one an argument, got 2"):
        vjp(trace, list(trace.inputs))
