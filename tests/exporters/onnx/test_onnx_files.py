"""ONNX files and the command line: converted, run, compared; and imported models as artifacts."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import tessera
from tessera import onnx as tessera_onnx
from tessera.onnx import load
from tessera.tools.cli import main
from tessera.util.errors import OptionError

SCRIPT = """
import torch

def make():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).eval()
    return net, (torch.ones(3, 4),)
"""


@pytest.fixture
def file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    script, path = tmp_path / "script.py", tmp_path / "net.onnx"
    script.write_text(SCRIPT)
    assert main(["convert", f"{script}:make", str(path), "--dynamic", "input:0=batch"]) == 0
    capsys.readouterr()
    return path


def test_a_script_becomes_a_file_and_an_artifact(file: Path) -> None:
    net, x = load(file), torch.randn(5, 4)
    artifact = file.with_suffix(".tess")
    assert main(["convert", str(file), str(artifact)]) == 0
    torch.testing.assert_close(tessera.load(artifact)(x), net(x))
    older = file.with_name("older.onnx")
    assert main(["convert", str(file), str(older), "--opset", "17"]) == 0
    assert onnx.load(older).opset_import[0].version == 17
    torch.testing.assert_close(load(older)(x), net(x))


def test_runs_are_compared(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json", str(file), "--random", "--size", "batch=3", "--compare", "reference"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["outputs"] == {"output": [3, 2]} and facts["agrees"]
    assert main(["run", str(file), "--random", "--compare", "eager"]) == 0
    assert "output: agrees" in capsys.readouterr().out


def test_the_first_node_that_differs_is_named(file: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    run_model = pytest.importorskip("tessera.tools.run_model")
    right = run_model.runtime

    def wrong(kind: str, model: object) -> object:
        def run(feeds: dict) -> list:
            held = onnx.load(model) if isinstance(model, str) else onnx.load_from_string(model)
            names = [o.name for o in held.graph.output]
            outputs = dict(zip(names, right(kind, model)(feeds), strict=True))
            return [x * 2 if name in ("1.Tanh", "output") else x for name, x in outputs.items()]

        return run

    monkeypatch.setattr(run_model, "runtime", wrong)
    assert main(["run", str(file), "--random", "--compare", "reference"]) == 1
    assert "first: node 1 (Tanh, '/1/Tanh')" in capsys.readouterr().out


def test_what_the_command_line_refuses(file: Path) -> None:
    for arguments in (
        ["run", str(file)],
        ["run", str(file), "--random", "--compare", "nobody"],
        ["convert", str(file), "x.onnx", "--dynamic", "input:0=batch"],
        ["convert", str(file), "x.tess", "--opset", "18"],
    ):
        assert main(arguments) == 2


def test_an_imported_model_is_an_artifact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    model = tessera_onnx.export(net, (torch.randn(2, 3, 8, 8),), dynamic={"input": {0: "batch"}}, check=False)
    assert model is not None
    imported = load(model)
    tessera.export(imported, (torch.randn(2, 3, 8, 8),), tmp_path / "net.tess")
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(tessera.load(tmp_path / "net.tess")(x), net(x))
    with pytest.raises(OptionError, match="those that its file names"):
        tessera.export(imported, (x,), tmp_path / "other.tess", dynamic={"input": {0: "batch"}})
