"""What an entry of an artifact is made of: a captured program, and how a caller's arguments line up with it.

In: an exported program, or a module that was read from an ONNX file, which has its Trace without being exported. Out: a
`Source`, whose program takes what the model holds first and then the caller's arguments.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tessera.frontends.arguments import Leaf, TensorLeaf, symbols_of
from tessera.frontends.export import Exported, capture_export
from tessera.frontends.export_model import exported_program
from tessera.ir.equation import Value
from tessera.ir.serial_check import is_name
from tessera.ir.serial_size import formula_of
from tessera.torch_internals import pytree
from tessera.util.errors import CaptureError

LONGEST = 60  # letters of a name that comes from a file


@dataclass(frozen=True)
class Source:
    exported: Exported
    names: tuple[str, ...]  # of what the model holds
    shared: tuple[bool, ...]  # whether that is the model's, and not this program's alone
    parameters: tuple[str, ...]  # the names of positional arguments


def source_of(model: Any, args: tuple, kwargs: dict, dynamic: object, name: str) -> Source:
    if hasattr(model, "__tessera_onnx__"):
        return _imported(model, args, kwargs, dynamic)
    program, parameters = exported_program(model, args, kwargs, dynamic)
    with torch.no_grad():
        exported = capture_export(program, name)
    held = [spec for spec in program.graph_signature.input_specs if spec.kind.name != "USER_INPUT"]
    names = tuple(spec.target or spec.arg.name for spec in held)
    return Source(exported, names, tuple(spec.kind.name in ("PARAMETER", "BUFFER") for spec in held), parameters)


def _imported(net: Any, args: tuple, kwargs: dict, dynamic: object) -> Source:
    """An ONNX graph is called by position. A size that its file names is any from 1 on, as far as the graph allows."""
    graph = importlib.import_module("tessera.onnx.recorded").whole_graph(net, args, kwargs, dynamic)  # onnx is an extra
    captured = graph.recorded.captured
    given = {name: v for v, name in graph.inputs.items()}
    users = [given[name] for name in net.input_names if name in given]
    if len(users) != len(net.input_names):
        raise CaptureError(f"the graph does not read all of its inputs {', '.join(net.input_names)}")
    results = [v for _, v in graph.outputs]
    if captured.aliased or captured.trace.mutations or len(results) != captured.outputs:
        raise CaptureError("the graph gives back an input, or one result twice")
    inputs, parameters = (*graph.weights, *users), plain_names(net.input_names)
    grads = dict(zip(captured.trace.inputs, captured.requires_grad, strict=True))
    trace = captured.trace.with_(inputs=inputs, outputs=(*results, *captured.trace.outputs[captured.outputs :]))
    captured = replace(captured, trace=trace, requires_grad=tuple(grads[v] for v in inputs))
    leaves: list[Leaf] = [_leaf(called, given[name]) for name, called in zip(net.input_names, parameters, strict=True)]
    exported = Exported(
        captured,
        tuple(x for _, x in graph.weights.values()),
        pytree.tree_structure((tuple(range(len(users))), {})),
        pytree.tree_structure(0 if len(results) == 1 else tuple(range(len(results)))),
        leaves,
        {symbol: bounds for symbol, bounds in graph.ranges.items() if symbol in symbols_of(leaves)},
        dict(zip(graph.sizes, plain_names(graph.sizes.values()), strict=True)),
        (),
    )
    names = tuple(name for name, _ in graph.weights.values())
    return Source(exported, names, tuple(v in graph.held for v in graph.weights), parameters)


def plain_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names as an artifact has them, each once: `input.1` is `input_1`."""
    taken: dict[str, None] = {}
    for name in names:
        plain = re.sub(r"\W", "_", name, flags=re.ASCII)[:LONGEST]
        plain = plain if is_name(plain) else f"x_{plain}"
        tried = itertools.chain([plain], (f"{plain}_{i}" for i in itertools.count(1)))
        taken[next(n for n in tried if n not in taken)] = None
    return tuple(taken)


def _leaf(name: str, v: Value) -> TensorLeaf:
    t = v.tensor
    shape, stride = (tuple(map(formula_of, part)) for part in (t.shape, t.stride))
    return TensorLeaf(name, t.dtype, torch.device(t.device.type), shape, stride)
