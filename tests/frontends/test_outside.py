"""Gradients through what ran before the graph are autograd's: such a graph runs eagerly."""

from __future__ import annotations

import pytest
import torch

import tessera
from tessera.frontends.dynamo.outside import refuse_outside_histories
from tessera.util.errors import CaptureError


def graph_of(inner: bool) -> torch.fx.GraphModule:
    """`grad((y * 2).sum(), x)`, or by a tensor that the graph itself makes."""
    graph = torch.fx.Graph()
    y, x = graph.placeholder("y"), graph.placeholder("x")
    by = graph.call_method("detach", (x,)) if inner else x
    total = graph.call_method("sum", (graph.call_function(torch.mul, (y, 2)),))
    graph.output(graph.call_function(torch.autograd.grad, ([total], [by])))
    return torch.fx.GraphModule({}, graph)


def test_a_history_outside_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(CaptureError, match="before the graph"):
        refuse_outside_histories(graph_of(inner=False), [x * 3, x])
    refuse_outside_histories(graph_of(inner=False), [x, x])  # leaves have none
    refuse_outside_histories(graph_of(inner=True), [x * 3, x])  # nothing outside leads to it


def test_jacobians_of_several_results() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 1, x.sin()

    x = torch.randn(3)
    got = tessera.jit(lambda x: torch.func.jacrev(both)(x))(x)
    torch.testing.assert_close(got, torch.func.jacrev(both)(x))
