"""`tessera profile` and `tessera report`: scripts of every kind, measured after they have run."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tessera.pipeline import compilation as pipelines
from tessera.tools import cli
from tessera.util.config import config

SCRIPT = """
import sys
import torch
import tessera

def f(x, w):
    h = torch.relu(x @ w)
    print("in the middle", sys.argv[1:])
    return (h.sin() + h.cos()).sum()

def model(x):
    return torch.tanh(x) * 2

def other():
    def model(x):
        return torch.exp(x) + 1
    return model

w = torch.randn(8, 8, requires_grad=True)
torch.compile(f)(torch.randn(4, 8), w).backward()
grad = w.grad.clone()
tessera.jit(model)(torch.ones(3))
tessera.jit(other())(torch.ones(3))
"""


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "executors", "sdpa,aten")  # every operator has a row of its own
    (tmp_path / "script.py").write_text(SCRIPT.lstrip())


def test_profile_measures_every_program_of_a_script(capsys, tmp_path):
    command = ["profile", "--json", "--steps", "2", "--chrome", "trace.json", "script.py", "--flag"]
    assert cli.main(command) == 0
    told = json.loads(capsys.readouterr().out)
    graphs = {(row["graph"], row["program"]) for row in told["rows"]}
    assert graphs == {
        ("f_0", "forward"), ("f_0", "backward"), ("f_1", "forward"), ("f_1", "backward"),
        ("model_0", "inference"), ("model_0 (2)", "inference"),
    }  # fmt: skip
    operators = {row["graph"]: row["operator"] for row in told["rows"] if row["operator"] in ("aten.tanh", "aten.exp")}
    assert operators == {"model_0": "aten.tanh", "model_0 (2)": "aten.exp"}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) > 10
    assert pipelines.WATCHERS == []


def test_profile_prints_a_table(capsys):
    assert cli.main(["profile", "--steps", "1", "--by", "line", "--no-backward", "script.py"]) == 0
    out = capsys.readouterr().out
    assert "script.py:6" in out and "a step on" in out and "in the middle []" in out


def test_report_shows_every_function_of_a_script(capsys, tmp_path):
    assert cli.main(["report", "--json", "--steps", "1", "-o", "out.html", "script.py"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] == (tmp_path / "out.html").stat().st_size
    data = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "out.html").read_text(), re.S)[1])
    assert data["title"] == "script.py"
    assert [g["name"] for g in data["graphs"]] == ["f_0", "f_1", "model_0", "model_0 (2)"]
    columns = data["profile"]["columns"]
    for row in data["profile"]["rows"]:
        graph = data["graphs"][row[columns.index("graph")]]
        line = graph["programs"][row[columns.index("program")]]["equations"][row[columns.index("index")]]
        assert row[columns.index("operator")].split(".")[1].rstrip("_") in data["lines"]["text"][line]


def test_report_without_measuring(tmp_path, capsys):
    assert cli.main(["report", "--no-measure", "script.py"]) == 0
    assert '"profile":null' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("command", ["profile", "report"])
def test_a_script_that_compiles_nothing_is_refused(command, tmp_path, capsys):
    (tmp_path / "plain.py").write_text("print(1)\n")
    assert cli.main([command, "plain.py"]) == 2
    assert "compiled nothing" in capsys.readouterr().err


def test_steps_must_be_some(capsys):
    assert cli.main(["profile", "--steps", "0", "script.py"]) == 2
    assert "at least 1 step" in capsys.readouterr().err


def test_a_training_step_in_a_script_counts_once(tmp_path, capsys):
    (tmp_path / "train.py").write_text(
        "import tessera, torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "loss = lambda m, x: m(x).square().mean()\n"
        "step = tessera.train_step(model, loss, torch.optim.SGD(model.parameters(), 0.1))\n"
        "step(torch.ones(2, 4))\n"
    )
    assert cli.main(["report", "--steps", "1", "-o", "out.html", "train.py"]) == 0
    data = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "out.html").read_text(), re.S)[1])
    assert [[p["name"] for p in g["programs"]] for g in data["graphs"]] == [["step"]]
    assert data["profile"]["rows"]
