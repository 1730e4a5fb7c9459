"""Recurrent layers, and operators that write their arguments, as ONNX."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tessera
from tessera.exporters.onnx.errors import ExportError
from tessera.onnx import export, load
from tessera.torch_internals import pytree

LAYERS = {
    "lstm": lambda **options: nn.LSTM(6, 5, **options),
    "gru": lambda **options: nn.GRU(6, 5, **options),
    "tanh": lambda **options: nn.RNN(6, 5, **options),
    "relu": lambda **options: nn.RNN(6, 5, nonlinearity="relu", **options),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "options",
    [{"batch_first": True, "bidirectional": True, "num_layers": 2}, {"num_layers": 2, "bias": False}, {}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_layers_of_any_length(kind: str, options: dict) -> None:
    torch.manual_seed(0)
    net = LAYERS[kind](**options).eval()
    model = export(net, (torch.randn(2, 3, 6),), dynamic={"input": {0: "first", 1: "second"}}, check=False)
    assert model is not None
    assert sum(node.op_type in ("LSTM", "GRU", "RNN") for node in model.graph.node) == options.get("num_layers", 1)
    for x in (torch.randn(4, 7, 6), torch.randn(1, 1, 6)):
        with torch.no_grad():
            wanted = pytree.tree_leaves(net(x))
        for got, expected in zip(load(model, compile=False)(x), wanted, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_train_without_dropout(kind: str) -> None:
    net, x = LAYERS[kind](num_layers=2).train(), torch.randn(4, 2, 6)
    model = export(net, (torch.randn(2, 3, 6),), dynamic={"input": {0: "length", 1: "batch"}}, check=False)
    for got, expected in zip(load(model, compile=False)(x), pytree.tree_leaves(net(x)), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_artifacts_of_any_length(kind: str, tmp_path) -> None:
    net = LAYERS[kind](batch_first=True, bidirectional=True).eval()
    path = tmp_path / "layer.tess"
    tessera.export(net, (torch.randn(2, 3, 6),), path, dynamic={"input": {0: "batch", 1: "length"}})
    loaded = tessera.load(path)
    for x in (torch.randn(4, 7, 6), torch.randn(1, 1, 6)):
        with torch.no_grad():
            got, wanted = loaded(x), net(x)
        torch.testing.assert_close(got, wanted)
        assert got[0].stride() == wanted[0].stride()


def test_layers_whose_steps_are_written_out_keep_their_length() -> None:
    net, x = nn.LSTM(6, 5, proj_size=3).eval(), torch.randn(3, 2, 6)
    assert export(net, (x,), dynamic={"input": {1: "batch"}}, check=False) is not None
    with pytest.raises(ExportError, match=r"no form for aten\.lstm"):
        export(net, (x,), dynamic={"input": {0: "length"}}, check=False)


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        held = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        return torch.ops.aten._batch_norm_with_update(x, *held, 0.1, 1e-5)[0]


def test_an_operator_that_writes_is_taken_apart() -> None:
    net, x = Statistics(), torch.randn(4, 6)
    model = export(net, (x,), check=False)
    assert model is not None
    assert [o.name for o in model.graph.output] == ["output", "norm.running_mean.updated", "norm.running_var.updated"]
    results = load(model, compile=False)(x)
    wanted = net(x)  # which writes the statistics
    for got, expected in zip(results, (wanted, net.norm.running_mean, net.norm.running_var), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(got, expected)
