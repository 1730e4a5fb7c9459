"""`tessera run model.onnx`: values of every kind, inputs that are none, and other files to compare with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tessera
from tessera.tools.cli import main
from tessera.util.errors import InputError, OptionError

onnx = pytest.importorskip("onnx")
make, KINDS = onnx.helper, onnx.TensorProto
X = make.make_tensor_value_info("x", KINDS.FLOAT, ["n", 4])
Y = make.make_tensor_value_info("y", KINDS.FLOAT, ["n", 4])
RELU = make.make_node("Relu", ["x"], ["y"])


def written(path: Path, nodes: list, outputs: list, inputs: tuple = (X,)) -> str:
    graph = make.make_graph(nodes, "g", list(inputs), outputs)
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 21)], ir_version=10), path)
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["run", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


KIND_OF_RESULTS = {
    "one sequence": (
        [make.make_node("SequenceConstruct", ["x", "x"], ["s"])],
        [make.make_tensor_sequence_value_info("s", KINDS.FLOAT, None)],
        {"s.0": [2, 4], "s.1": [2, 4]},
    ),
    "a sequence and a tensor": (
        [make.make_node("SequenceConstruct", ["x"], ["s"]), RELU],
        [make.make_tensor_sequence_value_info("s", KINDS.FLOAT, None), Y],
        {"s.0": [2, 4], "y": [2, 4]},
    ),
    "strings": (
        [make.make_node("Cast", ["x"], ["s"], to=KINDS.STRING)],
        [make.make_tensor_value_info("s", KINDS.STRING, None)],
        {"s": [2, 4]},
    ),
    "random numbers": ([make.make_node("RandomNormalLike", ["x"], ["y"])], [Y], {"y": [2, 4]}),
    "no elements": ([make.make_node("Compress", ["x", "c"], ["y"], axis=0)], [Y], {"y": [0, 4]}),
}


@pytest.mark.parametrize("other", ["reference", "eager"])
@pytest.mark.parametrize("name", KIND_OF_RESULTS)
def test_results_of_every_kind(name: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes, outputs, shapes = KIND_OF_RESULTS[name]
    condition = make.make_node("Constant", [], ["c"], value=make.make_tensor("c", KINDS.BOOL, [2], [False, False]))
    path = written(tmp_path / "m.onnx", [condition, *nodes], outputs)
    code, facts = told(capsys, path, "--random", "--compare", other)
    assert code == 0 and facts["agrees"] and facts["outputs"] == shapes


def test_random_numbers_do_not_hide_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = make.make_tensor_value_info("y", KINDS.FLOAT16, None)
    one = written(tmp_path / "one.onnx", [make.make_node("RandomNormalLike", ["x"], ["y"])], [Y])
    two = written(
        tmp_path / "two.onnx", [make.make_node("RandomNormalLike", ["x"], ["y"], dtype=KINDS.FLOAT16)], [half]
    )
    code, facts = told(capsys, one, "--random", "--compare", two)
    assert code == 1 and "float16" in facts["differences"][0]


def test_strings_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = make.make_tensor_value_info("a", KINDS.STRING, ["k"])
    out = make.make_tensor_value_info("s", KINDS.STRING, ["k"])
    names = ("StringConcat", ["a", "a"]), ("Identity", ["a"])
    one, two = (written(tmp_path / f"{op}.onnx", [make.make_node(op, i, ["s"])], [out], (text,)) for op, i in names)
    np.savez(tmp_path / "a.npz", a=np.array(["x", ""]))
    assert told(capsys, one, "--inputs", tmp_path / "a.npz", "--compare", "reference")[0] == 0
    code, facts = told(capsys, one, "--inputs", tmp_path / "a.npz", "--compare", two)
    assert code == 1 and facts["differences"] == ["s: 1 of 2 strings differ; the first is [0]: expected 'x', got 'xx'"]


def test_another_file_with_other_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swapped = [make.make_tensor_value_info(name, KINDS.FLOAT, ["n", 4]) for name in ("b", "a")]
    sub = [make.make_node("Sub", ["a", "b"], ["y"])]
    one = written(tmp_path / "one.onnx", sub, [Y], tuple(reversed(swapped)))
    two = written(tmp_path / "two.onnx", sub, [Y], tuple(swapped))  # the same names in another order
    assert told(capsys, one, "--random", "--compare", two)[0] == 0
    relu = written(tmp_path / "relu.onnx", [RELU], [Y])
    other = [make.make_node("Relu", ["p"], ["q"])]
    infos = [make.make_tensor_value_info(name, KINDS.FLOAT, ["n", 4]) for name in ("p", "q")]
    renamed = written(tmp_path / "renamed.onnx", other, [infos[1]], (infos[0],))
    assert told(capsys, relu, "--random", "--compare", renamed)[0] == 0
    assert main(["run", relu, "--random", "--compare", one]) == 2
    assert "expected the inputs x, got a, b" in capsys.readouterr().err


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> dict[str, object]:
        y = self.linear(x).view(x.shape[0], 2, 2) * scale["k"]
        return {"y": y, "top": y.topk(1)}


def test_an_artifact_of_nested_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    net, kwargs, dynamic = Nested().eval(), {"scale": {"k": torch.tensor(2.0)}}, {"x": {0: "rows"}}
    tessera.onnx.export(net, (torch.ones(3, 4),), tmp_path / "m.onnx", kwargs=kwargs, dynamic=dynamic)
    tessera.export(net, (torch.ones(3, 4),), tmp_path / "m.tess", kwargs=kwargs, dynamic=dynamic)
    code, facts = told(capsys, tmp_path / "m.onnx", "--random", "--compare", tmp_path / "m.tess")
    assert code == 0 and len(facts["differences"]) == 3
    with torch.no_grad():
        net.linear.bias += 1
    tessera.export(net, (torch.ones(3, 4),), tmp_path / "m.tess", kwargs=kwargs, dynamic=dynamic)
    code, facts = told(capsys, tmp_path / "m.onnx", "--random", "--compare", tmp_path / "m.tess")
    assert code == 1 and facts["first"].startswith("aten.linear")


def test_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = make.make_tensor_value_info("x", KINDS.FLOAT, ["n", "2*n", None])
    path = written(tmp_path / "m.onnx", [RELU], [make.make_empty_tensor_value_info("y")], (wide,))
    assert told(capsys, path, "--random", "--size", "n=3")[1]["outputs"]["y"][:2] == [3, 6]
    assert told(capsys, path, "--random", "--size", "n=0")[1]["outputs"]["y"][:2] == [0, 0]
    for size, message in (("m=3", "--size: expected n, got 'm'"), (f"n={10**8}", "the input 'x' of [100000000")):
        assert main(["run", path, "--random", "--size", size]) == 2
        assert message in capsys.readouterr().err


def test_inputs_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, x = written(tmp_path / "m.onnx", [RELU], [Y]), np.ones((3, 4), np.float32)
    tessera.export(torch.relu, (torch.ones(3, 4),), tmp_path / "m.tess")
    np.savez(tmp_path / "other.npz", q=x)
    np.save(tmp_path / "one.npy", x)
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object), arg0=np.array([{}], dtype=object))
    (tmp_path / "junk.npz").write_bytes(b"hello")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:100])
    for file, message in (
        ("other.npz", "there are q"),
        ("one.npy", "is one array"),
        ("objects.npz", "is no .npz file of plain arrays"),
        ("junk.npz", "is no .npz file of plain arrays"),
        ("cut.npz", "is no .npz file of plain arrays"),
        ("missing.npz", "No such file"),
    ):
        for model in (path, str(tmp_path / "m.tess")):
            assert main(["run", model, "--inputs", str(tmp_path / file)]) == 2
            assert message in capsys.readouterr().err


def test_a_length_that_a_graph_is_fixed_to(tmp_path: Path) -> None:
    """A layer of the file that runs step by step is written for as many steps as the example has."""
    torch.manual_seed(0)
    layer, x = nn.GRU(4, 4), torch.randn(3, 2, 4)
    dynamic = {"input": {0: "length", 1: "batch"}}
    imported = tessera.onnx.load(tessera.onnx.export(layer, (x,), dynamic=dynamic))
    tessera.export(imported, (x,), tmp_path / "m.tess")
    run = tessera.load(tmp_path / "m.tess")
    y = torch.randn(3, 5, 4)
    for got, wanted in zip(run(y), layer(y), strict=True):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(InputError, match="dimension 0: expected 3, which the program was exported for, got 4"):
        run(torch.randn(4, 5, 4))
    with pytest.raises(OptionError, match="the graph holds for steps of 3 alone, as in the example"):
        tessera.export(imported, (x,), tmp_path / "m.tess", dynamic={"input": {0: "steps"}})
