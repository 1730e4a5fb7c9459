"""ONNX files and the command line: converted, run, compared; and imported models as artifacts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import tessera
from tessera import onnx as tessera_onnx
from tessera.onnx import load
from tessera.tools.cli import main
from tessera.util.errors import InputError, OptionError

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


def test_the_first_node_that_differs_from_another_file(file: Path, tmp_path: Path, capsys) -> None:
    other, changed = onnx.load(file), tmp_path / "changed.onnx"
    (last,) = (node for node in other.graph.node if "output" in node.output)
    weight = next(w for w in other.graph.initializer if w.name == last.input[1])
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) + 1, weight.name))
    onnx.save(other, changed)
    assert main(["run", str(file), "--random", "--compare", str(changed)]) == 1
    assert f"first: node {len(other.graph.node) - 1} ({last.op_type}" in capsys.readouterr().out


def test_what_the_command_line_refuses(file: Path) -> None:
    for arguments in (
        ["run", str(file)],
        ["run", str(file), "--random", "--compare", "nobody"],
        ["convert", str(file), "x.onnx", "--dynamic", "input:1=batch"],
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
    for n in (1, 5, 16, 33):  # PyTorch's convolutions ask for sizes of 1 and 16; none is a condition of the program
        x = torch.randn(n, 3, 8, 8)
        torch.testing.assert_close(tessera.load(tmp_path / "net.tess")(x), net(x))


def test_sizes_of_an_imported_model_get_names_and_ranges(tmp_path: Path) -> None:
    model = tessera_onnx.export(nn.Linear(4, 3), (torch.ones(2, 4),), dynamic={"input": {0: "rows"}}, check=False)
    file, artifact = tmp_path / "linear.onnx", tmp_path / "linear.tess"
    file.write_bytes(model.SerializeToString())  # type: ignore[union-attr]
    assert main(["convert", str(file), str(artifact), "--dynamic", "input:0=batch:1..8"]) == 0
    fast = tessera.load(artifact)
    for n in (1, 8):
        torch.testing.assert_close(fast(torch.ones(n, 4)), load(str(file))(torch.ones(n, 4)))
    with pytest.raises(InputError, match="expected batch from 1 to 8, got 9"):
        fast(torch.ones(9, 4))
    imported = load(str(file))
    for dynamic, told in (
        ({"input": {1: "width"}}, "dimension 1 of input is 4 in the file"),
        ({"input": {2: "width"}}, "input has 2 dimensions, got 2"),
        ({"other": {0: "batch"}}, "expected one of input, got 'other'"),
        ({"input": {0: ("batch", 0, 8)}}, "holds for batch from 1 on, got 0..8"),
        ({"input": {0: "2*n"}}, "is no multiple: '2*n'"),
        ({"input": {0: 7}}, "expected a name, or a name and a range, got 7"),
    ):
        with pytest.raises(OptionError, match=re.escape(told)):
            tessera.export(imported, (torch.ones(2, 4),), tmp_path / "no.tess", dynamic=dynamic)


def test_names_that_python_has_no_form_for(tmp_path: Path) -> None:
    make = onnx.helper
    inputs = [make.make_tensor_value_info(name, 1, [f"{size} of it", 4]) for name, size in (("a.1", "n"), ("a_1", "m"))]
    nodes = [make.make_node("Relu", [i.name], [f"out/{i.name}"]) for i in inputs]
    outputs = [make.make_empty_tensor_value_info(f"out/{i.name}") for i in inputs]
    imported = load(make.make_model(make.make_graph(nodes, "class", inputs, outputs)))
    x, y = torch.randn(2, 4), torch.randn(3, 4)
    tessera.export(imported, (x, y), tmp_path / "names.tess")
    fast = tessera.load(tmp_path / "names.tess")
    assert "main(a_1: float32[n_of_it, 4] on cpu, a_1_1: float32[m_of_it, 4] on cpu)" in fast.explain()
    for got, wanted in zip(fast(y, x), (y.relu(), x.relu()), strict=True):
        assert torch.equal(got, wanted)
    with pytest.raises(OptionError, match="several sizes, not one, for rows"):
        dynamic = {"a.1": {0: "rows"}, "a_1": {0: "rows"}}
        tessera.export(imported, (x, y), tmp_path / "no.tess", dynamic=dynamic)
