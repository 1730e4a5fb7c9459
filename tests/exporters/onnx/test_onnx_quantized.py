"""Weights of few bits leave as they are stored, with a DequantizeLinear before the product."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx
import pytest
import torch
from leaving import answers, assert_same, written
from torch import nn

from tessera import quantize
from tessera.onnx import export

RUNTIMES = ("tessera", "reference", *(("ort",) if importlib.util.find_spec("onnxruntime") is not None else ()))
T = onnx.TensorProto


class Layers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=i > 0) for i in range(2))
        self.last = nn.Linear(256, 24)
        quantize(self, kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu() + x
        return self.last(x)


@pytest.mark.parametrize(
    "kind, opset, held", [("int8", 23, T.INT8), ("int4", 23, T.INT4), ("int8", 19, T.INT8), ("int4", 20, T.INT8)]
)
def test_small_integers_stay_small(kind: str, opset: int, held: int) -> None:
    net, x = Layers(kind), torch.randn(2, 3, 256)
    model = export(net, (x,), opset=opset, check=False)
    assert model is not None
    onnx.checker.check_model(model, full_check=True)
    assert [n.op_type for n in model.graph.node].count("DequantizeLinear") == 3
    stored = {
        w.name: w.data_type for w in model.graph.initializer if w.name.startswith(("layers.0.weight", "last.weight"))
    }
    assert list(stored.values()) == [held, held]
    wide = 256 * 256 * 2 + 256 * 24
    assert len(model.SerializeToString()) < wide * (1 if held == T.INT4 else 1.5)
    for by in RUNTIMES:
        assert_same(answers(model, (x,), by), net(x))


@pytest.mark.parametrize("opset", [18, 23])
def test_floats_of_eight_bits(opset: int) -> None:
    net, x = Layers("fp8"), torch.randn(2, 256)
    model = export(net, (x,), opset=opset, check=False)
    assert model is not None
    assert ("DequantizeLinear" in {n.op_type for n in model.graph.node}) == (opset >= 19)
    for by in RUNTIMES:
        assert_same(answers(model, (x,), by), net(x))


def test_packed_numbers_beside_the_file(tmp_path: Path) -> None:
    net, x = Layers("int4"), torch.randn(5, 256)
    export(net, (x,), tmp_path / "m.onnx", inside=1000, check=False)
    assert (tmp_path / "m.onnx.data").stat().st_size < 256 * 256 + 20_000
    model = onnx.load(tmp_path / "m.onnx")
    assert_same(answers(model, (x,), "tessera"), net(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fake_quantisation_is_pytorchs_bit_for_bit(dtype: torch.dtype) -> None:
    """QuantizeLinear divides by the scale, which is something else at ties."""
    scale, zero = torch.tensor([0.1, 0.03, 0.7]), torch.tensor([3, 0, -5], dtype=torch.int32)
    x = torch.cat([torch.randn(40, 3) * 5, torch.tensor([0.05, 0.15, -0.25, 1e9, -1e9])[:, None].expand(5, 3)])

    def fn(x: torch.Tensor) -> tuple:
        return (
            torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7),
            torch.fake_quantize_per_tensor_affine(x, scale[:1], zero[:1], 0, 255),
            torch.fake_quantize_per_channel_affine(x, scale, zero, 1, -128, 127),
            torch.fake_quantize_per_channel_affine(x, scale, zero + 0.3, 1, -128, 127),
        )

    x = x.to(dtype)
    model = written(fn, (x,), 23)
    assert not {n.op_type for n in model.graph.node} & {"QuantizeLinear", "DequantizeLinear"}
    for by in ("reference", "tessera"):
        for got, wanted in zip(answers(model, (x,), by), fn(x), strict=True):
            assert torch.equal(got, wanted), by
