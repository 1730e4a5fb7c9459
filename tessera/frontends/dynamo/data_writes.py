"""Writes in Dynamo's graphs: to arguments, and through `.data` to what a backward pass may read.

In: one of Dynamo's graphs, with the example value of every node. Out: what it writes, and how; or a
CaptureError.

What eager saves for backward shares the memory of the tensor, and a write through `.data` is hidden from autograd: the
gradient is computed from the new contents. Which values those are is a matter of each operator's formula, which a
functional program no longer shows. So a graph that writes so after a differentiable use runs eagerly; one that writes
first (weights clamped before they are used) is compiled.
"""

from __future__ import annotations

import operator

import torch

from tessera.torch_internals.autograd import get_data_attr
from tessera.torch_internals.functorch import innermost
from tessera.torch_internals.memory import storage_id
from tessera.util.errors import CaptureError


def refuse_hidden_writes(gm: torch.fx.GraphModule) -> None:
    nodes = list(gm.graph.nodes)
    hidden = {_memory(n.args[0]) for n in nodes if n.target is get_data_attr}
    if not hidden:  # nearly always
        return
    read: set[int | None] = set()
    for node in nodes:
        if node.op != "placeholder" and differentiable(node):
            # A formula may save its operands or its result; a view saves nothing of its base.
            read |= {_memory(a) for a in node.all_input_nodes} ^ {_memory(node)}
        written = _written(node)
        if written is not None and not differentiable(written) and _memory(written) in (hidden & read) - {None}:
            raise CaptureError(f"a write through .data to what {written.name} shares, after a differentiable use of it")


def refuse_inner_leaves(gm: torch.fx.GraphModule) -> None:
    """No argument and no result may get its history from a leaf that the graph makes (`requires_grad_`): gradients of a
    compiled program are those of its arguments. Where a result is made of such a leaf, Dynamo ends the graph before; of
    one that was written with it, it knows nothing."""
    nodes = list(gm.graph.nodes)
    behind = {n.args[0] for n in nodes if n.target == "requires_grad_"}
    if not behind:  # nearly always
        return
    arguments = {_memory(n) for n in nodes if n.op in ("placeholder", "get_attr")} - {None}
    written: set[int | None] = set()  # memory that has such a history
    for node in nodes:
        made = node if (target := _written(node)) is None else target
        if any(n in behind or _memory(n) in written for n in node.all_input_nodes) and _has_history(made):
            behind.add(node)
            written |= {_memory(target)} - {None}
        if written & arguments:
            raise CaptureError(f"{node.name} writes what depends on a leaf of the graph's own to an argument")
        if node.op == "output":
            for given in node.all_input_nodes:
                if _has_history(given) and (given in behind or _memory(given) in written):
                    raise CaptureError(f"the result {given.name} has its history from a leaf of the graph's own")


def _has_history(node: torch.fx.Node) -> bool:
    return differentiable(node) or keeps_history(node)


def keeps_history(node: torch.fx.Node) -> bool:
    """Dropout that may give its argument back, under no_grad too, with the history that Dynamo takes it to lose."""
    drops = node.target in (torch.dropout, torch.nn.functional.dropout)
    return drops and not differentiable(node) and any(map(differentiable, node.all_input_nodes))


def written_arguments(gm: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """The arguments with a gradient whose memory the graph writes: they go on with another history."""
    written = {_memory(target) for node in gm.graph.nodes if (target := _written(node)) is not None} - {None}
    arguments = (n for n in gm.graph.nodes if n.op == "placeholder") if written else ()
    return {n for n in arguments if differentiable(n) and _memory(n) in written}


def uncounted_arguments(gm: torch.fx.GraphModule) -> tuple[int, ...]:
    """The arguments, by position, that are written through `.data` alone: their versions do not count that."""
    nodes = list(gm.graph.nodes)
    behind = {n for n in nodes if n.target is get_data_attr}
    if not behind:  # nearly always
        return ()
    counted, hidden = set(), set()
    for node in nodes:
        if any(a in behind and _memory(a) == _memory(node) for a in node.all_input_nodes):
            behind.add(node)
        if (target := _written(node)) is not None:
            (hidden if target in behind else counted).add(_memory(target))
    arguments = [n for n in nodes if n.op == "placeholder"]
    return tuple(i for i, n in enumerate(arguments) if _memory(n) in hidden - counted)


def _example(node: object) -> object:
    return node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None


def differentiable(node: object) -> bool:
    """Whether what a node gives requires gradients, as Dynamo knows it."""
    value = _example(node)
    parts = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in parts)


def _memory(node: object) -> int | None:
    """What tells tensors that share memory; views share, and so do a tensor and its `.data`."""
    value = _example(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return storage_id(innermost(value))


def _written(node: torch.fx.Node) -> torch.fx.Node | None:
    """The tensor that the node writes to, if any."""
    out = node.kwargs.get("out")
    if isinstance(out, torch.fx.Node):
        return out
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    updates = node.target is operator.setitem or getattr(operator, name, None) is node.target and name.startswith("i")
    first = node.args[0] if node.args else None
    called = node.op in ("call_method", "call_function")
    return first if called and (in_place or updates) and isinstance(first, torch.fx.Node) else None
