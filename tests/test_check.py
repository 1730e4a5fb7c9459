"""`tessera.check`: right programs pass, planted errors are named, and the model is left as it was."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from planted import plant

import tessera
from tessera.executors import aten as aten_executor
from tessera.executors.register import unregister_executor
from tessera.ops.op import registry
from tessera.tools.models import Block, GPTConfig

MLP = ["tile", "aten"]
PLAIN = ["sdpa", "aten"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.down(F.dropout(F.gelu(self.norm(self.up(x))), 0.3, self.training))


def tangled(x):
    h = torch.sin(x) * 2
    return (h + x.cos()).sum(-1)


def args():
    return torch.randn(4, 8, requires_grad=True)


@pytest.mark.parametrize("executors", [("aten",), ("sdpa", "tile", "aten")])
def test_right_programs_pass(executors):
    block = Block(GPTConfig(width=32, heads=2))
    report = tessera.check(tessera.jit(block, executors=executors), torch.randn(2, 16, 32, requires_grad=True))
    assert report.ok and report.reference == "float64", str(report)
    assert any(c.what == "gradient of mlp.up.weight" for c in report.comparisons)
    assert any(c.what.startswith("gradient of argument") for c in report.comparisons)
    assert json.loads(json.dumps(report.to_dict()))["ok"] and str(report).startswith("right")


@pytest.mark.parametrize("executors", [("aten",), ("tile", "aten")])
def test_running_statistics_are_compared(executors):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    report = tessera.check(tessera.jit(net, executors=executors), torch.randn(4, 3, 8, 8))
    assert report.ok and not report.notes, str(report)
    (graph,) = report.graphs
    assert any(c.what.startswith("what is written to") for c in graph.comparisons)
    assert any(c.what == "buffer 1.running_mean" for c in report.comparisons)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_error(dtype):
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)).to(dtype)
    report = tessera.check(tessera.jit(model, executors=MLP), torch.randn(8, 32, dtype=dtype))
    assert report.ok, str(report)


def test_the_model_and_the_generator_are_left_as_they_were():
    model, x = Net(), args()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    report = tessera.check(model, x)
    assert report.ok and len(report.graphs) == 1, str(report)
    assert torch.equal(torch.get_rng_state(), state) and model.calls == 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in (*model.parameters(), x))
    assert any("random" in note for note in report.notes)


def test_inference_graph_breaks_and_written_arguments():
    def f(x, cache):
        cache.add_(1)
        y = x.sin() + cache
        torch._dynamo.graph_break()
        return {"y": y.cos(), "n": y.argmax(-1)}

    cache = torch.zeros(4, 8)
    with torch.no_grad():
        report = tessera.check(tessera.jit(f, executors=MLP), torch.randn(4, 8), cache)
    assert report.ok and len(report.graphs) == 2, str(report)
    assert not cache.any()


def test_a_wrong_vjp_rule_is_named(monkeypatch):
    monkeypatch.setattr(registry()["aten.sin"], "vjp", lambda ct, y, x: (ct * y,))
    report = tessera.check(tangled, args())
    (fault,) = report.faults
    assert not report.ok and fault.operator == "aten.sin" and fault.stage == "vjp"
    assert fault.guilty == "vjp rule of aten.sin" and "test_check.py:" in fault.line and "test_check.py" in fault.rule
    assert "WRONG" in str(report) and "aten.sin" in str(report)


def test_a_users_operator_with_a_wrong_derivative_is_named():
    """Eager autograd uses the same rule, so only the operator itself can tell."""
    cube = tessera.register_operator(
        "planted_cube", lambda x: x * x * x, vjp=lambda ct, y, x: (ct * 2 * x * x,), like=0
    )
    square = tessera.register_operator("right_square", lambda x: x * x, vjp=lambda ct, y, x: (ct * 2 * x,), like=0)
    try:
        assert tessera.check(lambda x: square(x).sum(), args()).ok
        report = tessera.check(lambda x: square(cube(x)).sum(), args())
    finally:
        del registry()["tessera_user.planted_cube"], registry()["tessera_user.right_square"]
    (fault,) = report.faults
    assert fault.operator == "tessera_user.planted_cube" and "finite differences" in fault.detail


def wrong_sines(trace):
    """Every cosine becomes a sine."""
    swap = {torch.ops.aten.cos.default: torch.ops.aten.sin.default}
    return trace.with_(equations=tuple(e.with_(op=swap.get(e.op, e.op)) for e in trace.equations))


@pytest.mark.parametrize(("before", "over"), [("dce", ""), ("joint cse", "joint"), ("forward lay_out", "forward")])
def test_a_wrong_pass_is_named(before, over, monkeypatch):
    plant(monkeypatch, wrong_sines, before, over)
    report = tessera.check(tessera.jit(tangled, executors=PLAIN), args())
    (fault,) = report.faults
    assert fault.guilty == "pass 'planted'", str(report)
    assert fault.stage.endswith("planted") and "aten.sin" in fault.operator and fault.line


def test_a_wrong_pass_in_inference(monkeypatch):
    plant(monkeypatch, wrong_sines, "schedule")
    with torch.no_grad():
        (fault,) = tessera.check(tessera.jit(tangled, executors=PLAIN), args()).faults
    assert fault.guilty == "pass 'planted'" and "cos = aten.sin(" in fault.equation


def test_a_wrong_executor_is_named():
    tessera.register_executor("planted", {"aten.gelu": lambda x, **_: torch.relu(x)})
    try:
        report = tessera.check(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), args())
    finally:
        unregister_executor("planted")
    (fault,) = report.faults
    assert fault.guilty == "executor 'planted'" and "gelu" in fault.operator


def test_a_wrong_binding_is_the_aten_executors(monkeypatch):
    right = aten_executor.bind

    def wrong(op):
        return torch.cos if op is torch.ops.aten.sin.default else right(op)

    monkeypatch.setattr("tessera.pipeline.executable.bind", wrong)
    monkeypatch.setattr("tessera.inspection.graph_check.bind", wrong)
    with torch.no_grad():
        (fault,) = tessera.check(tessera.jit(tangled, executors=PLAIN), args()).faults
    assert fault.guilty == "executor 'aten'" and fault.operator == "aten.sin"


def test_a_derivative_of_the_authors_choice_is_right():
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, ct):
            return ct

    report = tessera.check(lambda x: Through.apply(x * 3).sin(), args())
    assert report.ok, str(report)
