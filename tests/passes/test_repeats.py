"""Regions of programs that repeat themselves are those that the whole program would be given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from programs import trace_of
from tile_reference import Reference
from torch import Tensor

from tessera.executors import tile
from tessera.ir.trace import Trace
from tessera.passes.fuse.regions import _Fusion, fuse
from tessera.passes.fuse.repeats import shortened
from tessera.transforms.vjp import vjp

LAYERS, WIDTH = 24, 16


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "target_for", lambda device, target=Reference(): target)  # noqa: B008


def residual(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """A norm whose sum is the layer's before: kernels reach over the ends of layers."""
    for w, b in zip(weights, biases, strict=True):
        y = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)
        x = x + torch.relu(y @ w + b) * 2
    return x.sum()


def shared(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Every layer reads one value from before the first."""
    scale = torch.exp(x.mean(-1, keepdim=True))
    for w, b in zip(weights, biases, strict=True):
        x = torch.tanh((x @ w) * scale + b)
    return x.sum()


def every_second(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        x = torch.relu(x @ w + b) if i % 2 else torch.sigmoid(x @ w) * b
    return x.sum()


def _program(model: Callable, layers: int = LAYERS) -> Trace:
    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return model(x, list(parameters[:layers]), list(parameters[layers:]))

    parameters = [*(torch.randn(WIDTH, WIDTH) for _ in range(layers)), *(torch.randn(WIDTH) for _ in range(layers))]
    return trace_of(run, torch.randn(4, WIDTH), *parameters)


@pytest.mark.parametrize("model", [residual, shared, every_second])
def test_a_few_repeats_tell_how_all_are_fused(model: Callable) -> None:
    trace = _program(model)
    short = shortened(trace)
    assert short is not None and len(short.trace.equations) + short.gap == len(trace.equations)
    assert fuse(trace, tile.COMPILER) == _Fusion(trace, tile.COMPILER).run()


def test_gradients_repeat_in_the_other_direction() -> None:
    trace = _program(residual)
    joint = vjp(trace, list(trace.inputs)).trace
    assert fuse(joint, tile.COMPILER) == _Fusion(joint, tile.COMPILER).run()


def test_few_layers_are_left_as_they_are() -> None:
    assert shortened(_program(residual, layers=6)) is None


def test_a_value_that_is_read_at_the_end_is_not_left_out() -> None:
    def collected(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
        every = []
        for w, b in zip(weights, biases, strict=True):
            x = torch.relu(x @ w + b)
            every.append(x)
        return torch.stack(every).sum()

    assert shortened(_program(collected)) is None


def test_regions_that_grow_with_the_program_are_chosen_in_all_of_it() -> None:
    def chain(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
        for b in biases:
            x = torch.sin(x) + b
        return x

    trace = _program(chain, layers=60)
    assert shortened(trace) is not None
    assert fuse(trace, tile.COMPILER) == _Fusion(trace, tile.COMPILER).run()


def test_the_short_program_is_a_program() -> None:
    trace = _program(shared)
    short = shortened(trace)
    assert short is not None
    there = {*short.trace.inputs}
    for eqn in short.trace.equations:
        assert there.issuperset(eqn.inputs())
        there.update(eqn.results())
    assert there.issuperset(short.trace.results())
