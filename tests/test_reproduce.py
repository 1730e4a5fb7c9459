"""Reproducers: failures become scripts that show them, small ones, with no data of the user's in them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from planted import plant

import tessera
from tessera.executors.base import unregister
from tessera.inspection.case import of_compilation
from tessera.inspection.examples import example, range_of
from tessera.inspection.minimise import minimise
from tessera.ops.op import registry
from tessera.util.errors import InputError


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def model(x, w):
    h = F.gelu(x @ w)
    h = F.layer_norm(h, (32,))
    y = torch.erf(h) + h.softmax(-1)
    return (y * y).sum(-1), y.argmax(-1)


def args():
    return torch.randn(16, 64), torch.randn(64, 32, requires_grad=True)


def refuse_erf(trace):
    if any(e.op is torch.ops.aten.erf.default for e in trace.equations):
        raise KeyError("planted")
    return trace


def wrong_erf(trace):
    swap = {torch.ops.aten.erf.default: torch.ops.aten.tanh.default}
    return trace.with_(equations=tuple(e.with_(op=swap.get(e.op, e.op)) for e in trace.equations))


def run_script(path: str) -> dict:
    scope: dict = {"__name__": "repro"}
    with open(path) as file:
        exec(compile(file.read(), path, "exec"), scope)
    return scope


def shown(path: str) -> int:
    """What the script would exit with."""
    scope = run_script(path)
    (call,) = re.findall(r"sys\.exit\((show\(.*\))\)", Path(path).read_text())
    return eval(call, scope)


def test_a_failing_pass_becomes_a_script_of_one_equation(monkeypatch, tmp_path, capsys):
    plant(monkeypatch, refuse_erf)
    fast = tessera.jit(model)
    with pytest.warns(UserWarning, match=r"tessera\.reproduce"):
        fast(*args())
    path = tessera.reproduce(fast, str(tmp_path / "repro.py"))
    text = Path(path).read_text()
    assert text.count(" = aten.") == 1 and "aten.erf(" in text and "raises KeyError" in text
    assert "example((1, 1)" in text or "example((1," in text  # sizes shrank
    assert shown(path) == 1 and "planted" in capsys.readouterr().err
    monkeypatch.undo()
    assert shown(path) == 0


def test_a_strict_error_carries_its_program(monkeypatch, tmp_path):
    plant(monkeypatch, refuse_erf)
    with pytest.raises(Exception, match="planted") as caught:
        tessera.jit(model, strict=True)(*args())
    path = tessera.reproduce(caught.value, str(tmp_path / "repro.py"), minimise=False)
    assert Path(path).read_text().count("aten.") > 5
    with pytest.raises(KeyError) as functional:
        tessera.jit(model, frontend="functional")(*args())
    assert "aten.erf" in Path(tessera.reproduce(functional.value, str(tmp_path / "again.py"))).read_text()


def test_a_wrong_result_becomes_a_script(monkeypatch, tmp_path, capsys):
    plant(monkeypatch, wrong_erf)
    report = tessera.check(model, *args())
    assert report.faults[0].guilty == "pass 'planted'"
    path = tessera.reproduce(report, str(tmp_path / "repro.py"))
    text = Path(path).read_text()
    assert text.count(" = aten.") == 1 and "aten.erf(" in text and "(a wrong result)" in text
    assert shown(path) == 1 and "pass 'planted'" in capsys.readouterr().out


def test_a_wrong_gradient_keeps_what_is_differentiated(monkeypatch, tmp_path):
    monkeypatch.setattr(registry()["aten.erf"], "vjp", lambda ct, y, x: (ct * y,))
    path = tessera.reproduce(tessera.check(model, *args()), str(tmp_path / "repro.py"))
    assert "requires_grad=[True]" in Path(path).read_text() and shown(path) == 1


def test_dynamic_sizes_and_indices(monkeypatch, tmp_path):
    def f(x, i):
        return torch.erf(x.view(-1, 2))[i] * x.shape[0]

    plant(monkeypatch, refuse_erf)
    fast = tessera.jit(f, dynamic=True)
    with pytest.warns(UserWarning, match="planted"):
        fast(torch.randn(6, 4), torch.tensor([3, 7]))
    path = tessera.reproduce(fast, str(tmp_path / "repro.py"))
    assert Path(path).read_text().count(" = aten.") <= 2 and shown(path) == 1


def test_no_data_is_written(tmp_path):
    fast = tessera.jit(model)
    x, w = args()
    fast(x, w)
    path = tessera.reproduce(fast, str(tmp_path / "repro.py"))
    text = Path(path).read_text()
    assert "no failure on made-up inputs" in text
    assert f"{x[0, 0].item():.4f}" not in text and list(tmp_path.iterdir()) == [tmp_path / "repro.py"]
    assert shown(path) == 0


def test_minimise_keeps_only_what_fails(monkeypatch):
    fast = tessera.jit(model, strict=True)
    fast(*args())
    compilation = tessera.just_in_time.compiled.compiled_state(fast).compilations()[0]
    whole = of_compilation(compilation)
    assert minimise(whole) is whole  # nothing fails: nothing is made smaller
    plant(monkeypatch, refuse_erf)
    left: list[int] = []
    small = minimise(whole, told=left.append)
    assert len(small.trace.equations) == 1 and left[-1] == 1
    assert small.outcome() == "raises KeyError"


def test_examples_are_the_same_everywhere():
    x = example((2, 3), (1, 2), torch.bfloat16, seed=3)
    assert x.stride() == (1, 2) and torch.equal(x, example((2, 3), (1, 2), torch.bfloat16, seed=3))
    assert example((4,), dtype=torch.int64).tolist() == [0, 0, 0, 0]
    indices = example((100,), dtype=torch.int64, between=(2, 5))
    assert indices.min() == 2 and indices.max() == 5
    assert example((3, 4), (0, 1)).shape == (3, 4) and example((0, 4)).numel() == 0
    assert range_of(torch.tensor([1, 5])) == (1.0, 5.0) and range_of(torch.tensor([-1.0, 1.0])) is None


def test_what_cannot_be_reproduced_says_so():
    with pytest.raises(InputError, match="carries no program"):
        tessera.reproduce(ValueError("no"))
    with pytest.raises(InputError, match=r"tessera\.jit"):
        tessera.reproduce(model)
    with pytest.raises(InputError, match="call the function first"):
        tessera.reproduce(tessera.jit(model))


def test_the_script_runs_by_itself(tmp_path):
    fast = tessera.jit(lambda x: x.sin().sum())
    fast(torch.randn(4, requires_grad=True))
    path = tessera.reproduce(fast, str(tmp_path / "repro.py"))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "right" in done.stdout, done.stderr


def test_the_script_names_an_executor_of_the_users_own(tmp_path):
    tessera.register_executor("louder", {"aten.relu": lambda x: torch.relu(x) * 1.5})
    try:
        fast = tessera.jit(lambda x: x.relu() + 1, executors=["louder", "aten"])
        fast(torch.randn(4))
        path = tessera.reproduce(fast, str(tmp_path / "repro.py"), minimise=False)
    finally:
        unregister("louder")
    with open(path) as file:
        assert "needs the executor 'louder'" in file.read()
