"""Layers that PyTorch's library for CPUs runs whole, and operators that write their arguments, as ONNX."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.onnx import export, load


@pytest.mark.parametrize(("both_ways", "bias"), [(False, True), (True, False)])
def test_lstm(both_ways: bool, bias: bool) -> None:
    torch.manual_seed(0)
    net = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=both_ways, bias=bias).eval()
    model = export(net, (torch.randn(2, 3, 6),), dynamic={"input": {0: "batch"}}, check=False)
    assert model is not None
    x = torch.randn(4, 3, 6)
    with torch.no_grad():
        output, (hidden, cell) = net(x)
        for got, wanted in zip(load(model, compile=False)(x), (output, hidden, cell), strict=True):  # type: ignore[arg-type]
            torch.testing.assert_close(got, wanted)


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
