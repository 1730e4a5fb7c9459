"""Control flow in ONNX: cond is If, while_loop is Loop, scan and map are Scan."""

from __future__ import annotations

import importlib.util

import onnx
import pytest
import torch
from leaving import answers, assert_same
from torch import nn
from torch._higher_order_ops import map as torch_map
from torch._higher_order_ops import scan as torch_scan
from torch._higher_order_ops import while_loop as torch_while

import tessera
from tessera.onnx import export, load

RUNTIMES = ("tessera", "reference", *(("ort",) if importlib.util.find_spec("onnxruntime") is not None else ()))
X = torch.arange(12.0).reshape(3, 4) - 5


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.one(x).relu(), lambda x: self.other(x) - x.shape[0], (x,)) * 2


class Doubling(nn.Module):
    """Doubles until the sum passes a bound; a second value counts."""

    def forward(self, x: torch.Tensor, bound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch_while(
            lambda x, n: (x.sum() < bound) & (n < 20), lambda x, n: (x * 2 + bound / 8, n + 1), (x, torch.tensor(0))
        )


class Running(nn.Module):
    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.reverse = reverse

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def step(h: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            new = torch.tanh(self.layer(h) + row)
            return new, new * 2

        return torch_scan(step, torch.zeros(4), x, dim=0, reverse=self.reverse)


class Nested(nn.Module):
    """A branch inside a loop inside a branch, which reads values from all around."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def turn(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.cond(n > 1, lambda x: x + y, lambda x: x * 2, (x,)), n + 1

        def loop(x: torch.Tensor) -> torch.Tensor:
            return torch_while(lambda x, n: n < 4, turn, (x, torch.tensor(0)))[0]

        return torch.cond(y.sum() > 0, loop, lambda x: x - y, (x,))


class Mapped(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch_map(lambda row, y: (row * y).cumsum(0), x, y)


CASES = {
    "cond": (Branches(), [(X,), (-X - 5,)], {"If"}),
    "while_loop": (Doubling(), [(X.abs(), torch.tensor(500.0)), (X.abs(), torch.tensor(0.0))], {"Loop"}),
    "scan": (Running(False), [(X,)], {"Scan"}),
    "reversed scan": (Running(True), [(X,)], {"Scan"}),
    "nested": (Nested(), [(X, X.abs()), (X, -X.abs())], {"If", "Loop"}),
    "map": (Mapped(), [(X, X[0].clone())], {"Scan"}),
}


def kinds(graph: onnx.GraphProto) -> set[str]:
    inner = [kinds(a.g) for n in graph.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH]
    return {n.op_type for n in graph.node}.union(*inner)


@pytest.mark.parametrize("name", CASES)
def test_control_flow_leaves_and_comes_back(name: str) -> None:
    net, samples, expected = CASES[name]
    for opset in (17, 23):
        model = export(net, samples[0], opset=opset, check=False)
        assert model is not None
        onnx.checker.check_model(model, full_check=True)
        assert expected <= kinds(model.graph)
        for inputs in samples if opset == 23 else samples[:1]:  # what runs is the same in both
            for by in RUNTIMES:
                assert_same(answers(model, inputs, by), net(*inputs))


def test_sizes_that_change_in_branches_and_steps() -> None:
    for net in (Branches(), Running(False)):
        model = export(net, (X,), dynamic={"x": {0: "rows"}}, check=False)
        assert model is not None
        for rows in (2, 5):
            x = torch.randn(rows, 4)
            for by in RUNTIMES:
                assert_same(answers(model, (x,), by), net(x))


def test_branches_that_read_sizes_come_back() -> None:
    """A size is known in a branch before anything there is computed, whether or not a tensor that has it is read."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def longer(y: torch.Tensor) -> torch.Tensor:
            return y * 2 + torch.arange(x.shape[0]).sum()

        return torch.cond(y.sum() > 0, longer, lambda y: y.flip(0) - x.shape[1], (y,))

    sizes = {"x": {0: "rows", 1: "columns"}, "y": {0: "length"}}
    model = export(fn, (X, torch.ones(3)), dynamic=sizes, check=False)
    assert model is not None
    net = load(model)
    for shape in ((2, 3), (5, 4)):
        x = torch.randn(shape)
        for y in (torch.ones(6), -torch.arange(7.0)):
            assert_same([net(x, y)], fn(x, y))
    assert not tessera.explain(net).eager
