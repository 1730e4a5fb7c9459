"""`tessera.onnx.export`: whole models, names, sizes, functions, files, and what is checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from leaving import assert_same
from torch import nn

from tessera.exporters.onnx import runtimes
from tessera.onnx import ExportError, export, load, writing
from tessera.util.errors import OptionError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        return x + self.out(y) * shift.unsqueeze(0)


class Tiny(nn.Module):
    """Embeddings, equal blocks, and a last layer that is tied to the first."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(8, 11, bias=False)
        self.last.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        places = self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.tokens(ids) + places
        for block in self.blocks:
            x = block(x, places)
        return {"logits": self.last(x)}


DYNAMIC = {"ids": {0: "batch", 1: ("length", 2, 16)}}
IDS = torch.arange(10).reshape(2, 5) % 11


def exported(opset: int | None = None) -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    net = Tiny().eval()
    model = export(net, (IDS,), dynamic=DYNAMIC, opset=opset, check=False)
    assert model is not None
    return net, model


def test_a_model_with_sizes_that_change() -> None:
    for opset in (17, 23):
        net, model = exported(opset)
        onnx.checker.check_model(model, full_check=True)
        for shape in ((2, 5), (3, 9), (1, 2)):
            ids = torch.randint(0, 11, shape)
            assert_same([load(model, compile=False)(ids)], net(ids))


def test_names_are_those_of_modules_and_sizes() -> None:
    _, model = exported()
    assert [(i.name, [d.dim_param for d in i.type.tensor_type.shape.dim]) for i in model.graph.input] == [
        ("ids", ["batch", "length"])
    ]
    (out,) = model.graph.output
    assert out.name == "logits"
    assert [d.dim_param or d.dim_value for d in out.type.tensor_type.shape.dim] == ["batch", "length", 11]
    weights = {w.name for w in model.graph.initializer}
    assert {"positions.weight", "blocks.1.norm.weight", "blocks.2.qkv.bias"} <= weights
    assert len({"tokens.weight", "last.weight"} & weights) == 1  # they are one
    assert any("test_onnx_out.py" in node.doc_string for node in model.graph.node)
    assert len({node.name for node in model.graph.node}) == len(model.graph.node)


def test_equal_blocks_are_one_function() -> None:
    _, model = exported()
    (function,) = model.functions
    calls = [node for node in model.graph.node if node.op_type == function.name]
    assert [call.name for call in calls] == ["/blocks/0", "/blocks/1", "/blocks/2"]
    # what the blocks share is computed once, outside of them
    assert sum(node.op_type == "Unsqueeze" for node in (*function.node, *model.graph.node)) <= 2
    assert "Attention" in [node.op_type for node in function.node]


def test_in_and_out_and_in_again() -> None:
    net, model = exported()
    once = load(model, compile=False)
    ids = torch.randint(0, 11, (3, 6))
    again = export(once, (ids,), check=False)
    assert again is not None
    twice = load(again, compile=False)
    other = torch.randint(0, 11, (2, 7))
    assert torch.equal(once(other), twice(other))
    assert [d.dim_param for d in again.graph.input[0].type.tensor_type.shape.dim] == ["batch", "length"]
    assert {"positions.weight", "blocks.1.norm.weight"} <= set(twice.state_dict())


def test_what_a_model_writes_is_a_further_output() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x.sum(0))  # type: ignore[operator]
            return x * 2

    net = Counts()
    model = export(net, (torch.ones(2, 3),), check=True)
    assert model is not None and [o.name for o in model.graph.output] == ["output", "seen.updated"]
    assert torch.equal(net.seen, torch.zeros(3))  # type: ignore[arg-type]  # checking leaves it alone
    assert_same(list(load(model, compile=False)(torch.ones(2, 3))), (torch.full((2, 3), 2.0), torch.full((3,), 2.0)))


def test_weights_may_lie_beside_the_file(tmp_path: Path) -> None:
    net = nn.Linear(64, 64)
    path = tmp_path / "m.onnx"
    x = torch.randn(2, 64)
    export(net, (x,), path, inside=1000)
    beside = tmp_path / "m.onnx.data"
    assert beside.stat().st_size == 64 * 64 * 4 and path.stat().st_size < 2000
    held = {w.name: w for w in onnx.load(path, load_external_data=False).graph.initializer}
    offsets = [e.value for e in held["weight"].external_data if e.key == "offset"]
    assert offsets == ["0"] and not held["bias"].external_data
    assert_same([load(path, compile=False)(x)], net(x))


def test_more_weights_than_a_message_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.exporters.onnx.file.LARGEST", 10_000)
    net, x = nn.Linear(64, 64), torch.randn(2, 64)
    with pytest.raises(ExportError, match="at most 10,000 bytes of weights, got 16,640: give a path"):
        export(net, (x,))
    export(net, (x,), tmp_path / "m.onnx", inside=1 << 40)
    assert (tmp_path / "m.onnx.data").exists()
    assert_same([load(tmp_path / "m.onnx", compile=False)(x)], net(x))


def test_weights_of_the_model_before_stay_until_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, x = tmp_path / "m.onnx", torch.randn(2, 64)
    nets = [nn.Linear(64, 64) for _ in range(4)]
    for i, net in enumerate(nets[:3]):
        export(net, (x,), path, inside=1000)
        assert_same([load(path, compile=False)(x)], net(x))
        assert {f.name for f in tmp_path.iterdir()} == {"m.onnx", "m.onnx.1.data" if i == 1 else "m.onnx.data"}
    written: list[str] = []
    replace = os.replace

    def stopped(old: str, new: Path) -> None:
        written.append(Path(new).name)
        if len(written) == 2:  # the weights are there, the model is not yet
            assert_same([load(path, compile=False)(x)], nets[2](x))
            raise OSError("power cut")
        replace(old, new)

    monkeypatch.setattr("os.replace", stopped)
    with pytest.raises(OSError, match="power cut"):
        export(nets[3], (x,), path, inside=1000)
    assert written == ["m.onnx.1.data", "m.onnx"]
    assert_same([load(path, compile=False)(x)], nets[2](x))
    assert {f.name for f in tmp_path.iterdir()} == {"m.onnx", "m.onnx.data"}


def test_a_write_that_fails_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"before")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export(nn.Linear(3, 2), (torch.ones(1, 3),), path)
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_a_version_that_the_runtime_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the reference evaluator answers."""
    right, asked = runtimes.runtime, []

    def runtime(kind: str, model: bytes) -> object:
        asked.append(kind)
        if kind == runtimes.ORT:
            raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : Unsupported model IR version: 14, max supported: 13")
        return right(kind, model)

    monkeypatch.setattr(writing, "preferred", lambda: runtimes.ORT)
    monkeypatch.setattr(writing, "runtime", runtime)
    assert export(nn.Linear(3, 4), (torch.ones(2, 3),), opset=22) is not None
    assert asked == [runtimes.ORT, runtimes.REFERENCE]


def test_another_answer_is_told_with_its_worst_element(monkeypatch: pytest.MonkeyPatch) -> None:
    right = runtimes.runtime

    def wrong(kind: str, model: bytes) -> object:
        def run(feeds: dict) -> list:
            (out,) = right("reference", model)(feeds)
            out = np.array(out)
            out[1, 2] += 1
            return [out]

        return run

    monkeypatch.setattr(writing, "runtime", wrong)
    with pytest.raises(ExportError, match=r"output: 1 of 8 elements differ; the worst is \[1, 2\]"):
        export(nn.Linear(3, 4), (torch.ones(2, 3),))


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="opset: expected 17 to"):
        export(nn.Linear(3, 4), (torch.ones(2, 3),), opset=9)
    _, model = exported()
    with pytest.raises(OptionError, match="dynamic: expected one of ids, got 'idx'"):
        export(load(model), (IDS,), dynamic={"idx": {0: "batch"}})


def test_functions_and_several_results() -> None:
    def fn(x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], flag: bool = True) -> tuple:
        return x + pair[0], {"b": pair[1] if flag else x, "n": 3}

    args = (torch.ones(2), (torch.zeros(2), torch.arange(2)))
    model = export(fn, args)
    assert model is not None
    assert [o.name for o in model.graph.output] == ["output.0", "output.1.b", "output.1.n"]


def test_sizes_are_computed() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.reshape(-1, 2) * x.shape[0], torch.zeros(x.shape[0] * 2 + 1, x.shape[1])

    model = export(fn, (torch.ones(6, 4),), dynamic={"x": {0: "rows"}}, check=False)
    assert model is not None and any("rows" in d.dim_param for d in model.graph.output[1].type.tensor_type.shape.dim)
    for rows in (4, 10):
        x = torch.randn(rows, 4)
        assert_same(list(load(model, compile=False)(x)), fn(x))


def test_onnx_runtime_agrees_at_other_sizes() -> None:
    ort = pytest.importorskip("onnxruntime")
    for opset in (17, 23):
        net, model = exported(opset)
        session = ort.InferenceSession(model.SerializeToString())
        for shape in ((2, 5), (4, 9)):
            ids = torch.randint(0, 11, shape)
            (got,) = session.run(None, {"ids": ids.numpy()})
            assert_same([torch.from_numpy(got)], net(ids))


class Causal(nn.Module):
    """All of the table is a case of its own to PyTorch: it lies in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril().view(1, 1, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        return torch.where(self.mask[:, :, length - x.shape[-2] : length, :length], x, torch.full([], -1.0))  # type: ignore[index]


def contrast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ y.T, torch.arange(len(x)))


class Options(nn.Module):
    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return x * 2 + options["y"] if options["twice"] else x


@pytest.mark.parametrize(
    ("model", "shapes", "kwargs", "dynamic"),
    [
        (Causal(), [(2, 1, 5, 5)], {}, {"x": {2: "length", 3: "length"}}),
        (contrast, [(5, 4), (5, 4)], {}, {"x": {0: "n"}, "y": {0: "n"}}),
        (Options(), [(5, 4)], {"twice": True, "y": torch.ones(4)}, {"x": {0: "n"}}),
    ],
    ids=["the end of a table", "the length of a tensor", "further arguments by name"],
)
def test_sizes_stay_open(model: Callable, shapes: list[tuple], kwargs: dict, dynamic: dict) -> None:
    written = export(model, tuple(map(torch.randn, shapes)), kwargs=kwargs, dynamic=dynamic, check=False)
    assert written is not None
    for size in (2, 9, 15):
        given = [torch.randn([size if n == 5 else n for n in shape]) for shape in shapes]
        tensors = [x for x in kwargs.values() if isinstance(x, torch.Tensor)]
        assert_same([load(written, compile=False)(*given, *tensors)], model(*given, **kwargs))
