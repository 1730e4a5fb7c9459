"""What an entry of an artifact is made of: a captured program, and how a caller's arguments line up with it.

In: an exported program, or a module that was read from an ONNX file, which has its Trace without being exported. Out: a
`Source`, whose program takes what the model holds first and then the caller's arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram

from tessera.frontends.captured import Captured
from tessera.frontends.export import capture_export
from tessera.frontends.export_model import exported_program
from tessera.torch_internals import pytree
from tessera.util.errors import CaptureError, OptionError


@dataclass(frozen=True)
class Source:
    captured: Captured
    held: tuple[torch.Tensor, ...]  # parameters, buffers and constants: the first inputs
    names: tuple[str, ...]  # of those
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    parameters: tuple[str, ...]  # the names of positional arguments
    values: tuple[object, ...]  # of each flat argument that is no tensor and no size
    ranges: Mapping[str, list]  # of every symbolic size, the least and the most; None where there is no bound


def source_of(model: Any, args: tuple, kwargs: dict, dynamic: object, name: str) -> Source:
    if hasattr(model, "__tessera_onnx__"):
        if dynamic:
            raise OptionError("dynamic: the sizes of an imported model are those that its file names")
        return _imported(model, args, kwargs)
    program, parameters = exported_program(model, args, kwargs, dynamic)
    with torch.no_grad():
        exported = capture_export(program, name)
    specs = program.graph_signature.input_specs
    return Source(
        exported.captured,
        exported.held,
        tuple(_target(spec) for spec in specs if _target(spec)),
        exported.in_spec,
        exported.out_spec,
        parameters,
        tuple(getattr(spec.arg, "value", None) for spec in specs if not _target(spec)),
        _ranges(program),
    )


def _imported(net: Any, args: tuple, kwargs: dict) -> Source:
    """An ONNX graph is called by position; a size that its file names is any from 2 on, as everywhere in PyTorch."""
    graph = importlib.import_module("tessera.onnx.recorded").whole_graph(net, args, kwargs)  # onnx is an extra
    captured = graph.recorded.captured
    env = graph.recorded.mode.shape_env
    if env is not None and env.guards:
        told = ", ".join(str(guard.expr) for guard in env.guards)
        raise CaptureError(f"the graph holds for some sizes only, where {told}")
    trace, old = captured.trace, captured.trace.inputs
    given = {name: v for v, name in graph.inputs.items()}
    users = [given[name] for name in net.input_names if name in given]
    if len(users) != len(net.input_names):
        raise CaptureError(f"the graph does not read all of its inputs {', '.join(net.input_names)}")
    inputs = (*graph.weights, *users)
    place = {old.index(v): i for i, v in enumerate(inputs)}
    results = [v for _, v in graph.outputs]
    if captured.aliased or len(results) != captured.outputs:
        raise CaptureError("the graph gives back an input, or one result twice")
    trace = trace.with_(inputs=inputs, outputs=(*results, *trace.outputs[captured.outputs :]))
    grads = tuple(captured.requires_grad[o] for o, _ in sorted(place.items(), key=lambda pair: pair[1]))
    symbols = sorted({s for s, (v, dim) in trace.symbols.items() if dim is not None})
    return Source(
        replace(captured, trace=trace, requires_grad=grads),
        tuple(x for _, x in graph.weights.values()),
        tuple(name for name, _ in graph.weights.values()),
        pytree.tree_structure((tuple(range(len(users))), {})),
        pytree.tree_structure(0 if len(results) == 1 else tuple(range(len(results)))),
        tuple(net.input_names),
        (None,) * len(users),
        {symbol: [2, None] for symbol in symbols},
    )


def _ranges(program: ExportedProgram) -> dict[str, list]:
    ranges = {}
    for symbol, bounds in program.range_constraints.items():
        low, high = (int(b) if getattr(b, "is_Integer", False) else None for b in (bounds.lower, bounds.upper))
        ranges[str(symbol)] = [low if low is not None else 0, high if high is None or high < 1 << 62 else None]
    return ranges


def _target(spec: object) -> str:
    """The name of a parameter, buffer or constant; empty for an argument."""
    return "" if spec.kind.name == "USER_INPUT" else spec.target or spec.arg.name  # type: ignore[attr-defined]
