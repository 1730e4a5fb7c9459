"""Gradients that a graph asks for through what ran before it.

In: a Dynamo graph and the tensors it is called with. Out: nothing, or a `CaptureError`: the graph runs eagerly. A
gradient inside the graph sees the equations of the graph. Where it starts from an argument with a history of its own
and ends at another argument, autograd would go on behind the graph, as in `torch.func.jacrev` after a graph break.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.util.errors import CaptureError

GRADIENTS = ("_autograd_grad", "grad")  # of torch.func and torch.autograd: outputs, then inputs


def refuse_outside_histories(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> None:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    historic = {n for n, x in zip(placeholders, example_inputs, strict=True) if _has_history(x)}
    if not historic:
        return
    for node in gm.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in GRADIENTS or len(node.args) < 2:
            continue
        outputs, inputs = (_nodes(a) for a in node.args[:2])
        if any(n.op == "placeholder" for n in inputs) and (_sources(outputs) & historic).difference(inputs):
            raise CaptureError("a gradient that goes through what ran before the graph; the graph runs eagerly")


def _has_history(x: object) -> bool:
    try:
        return isinstance(x, torch.Tensor) and x.grad_fn is not None
    except RuntimeError as error:  # a view made under no_grad, whose base was written in place since
        raise CaptureError(f"autograd does not tell an argument's history ({error}); the graph runs eagerly") from error


def _nodes(tree: object) -> list[torch.fx.Node]:
    listed = tree if isinstance(tree, (list, tuple)) else (tree,)
    return [n for n in listed if isinstance(n, torch.fx.Node)]


def _sources(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """The placeholders that nodes are computed from."""
    seen: set[torch.fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return {n for n in seen if n.op == "placeholder"}
