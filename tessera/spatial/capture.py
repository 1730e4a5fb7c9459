"""Models as graphs of homes.

In: a module (also one of an ONNX file), function, exported program, artifact or Trace, and example arguments. Out: a
`Graph`, whose outputs are the tensors that the model gives, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

import tessera.spatial.importer.forms
import tessera.spatial.importer.windows  # noqa: F401  (they declare them)
from tessera.distributed.known_experts import known_experts
from tessera.frontends.export import capture_export
from tessera.frontends.export_model import exported_program
from tessera.ir.equation import Value
from tessera.ir.mesh import Mesh
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.passes.clean.fold import fold
from tessera.passes.clean.inline import inline
from tessera.spatial.errors import MapError
from tessera.spatial.graph import Graph
from tessera.spatial.importer.together import together
from tessera.torch_internals.fake import FakeTensorMode


@dataclass(frozen=True)
class Captured:
    trace: Trace
    mode: FakeTensorMode
    weights: Mapping[Value, tuple[str, torch.Tensor]]

    @functools.cached_property
    def graph(self) -> Graph:
        """Of the whole program, wherever it runs."""
        return together(self.trace, self.mode, self.weights, Mesh(()), lambda size, ranks: False)


def captured(model: Callable | ExportedProgram | Trace | Captured, args: tuple, kwargs: dict) -> Captured:
    if isinstance(model, Captured):
        return model
    if isinstance(model, Trace):
        return Captured(cleaned(model), FakeTensorMode(), {})
    if not isinstance(model, torch.nn.Module | ExportedProgram) and hasattr(model, "entries"):
        model = model.module()  # type: ignore[union-attr]  # an artifact, which `tessera.load` gave
    if isinstance(model, ExportedProgram) and (args or kwargs):
        model = model.module()  # its sizes may be open: they are those of the arguments
    if hasattr(model, "__tessera_onnx__"):
        return _from_file(model, args, kwargs)
    with known_experts(model) if isinstance(model, torch.nn.Module) else nullcontext():
        exported, _ = exported_program(model, args, kwargs, None)  # type: ignore[arg-type]
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "program")
    with torch.no_grad():
        program = capture_export(exported, name if name.isidentifier() else "program")
    trace = program.captured.trace
    held = [s.target or s.arg.name for s in exported.graph_signature.input_specs if s.kind.name != "USER_INPUT"]
    outputs = tuple(o for o in trace.outputs[: program.captured.outputs] if o is not None)
    if not outputs:
        raise MapError(f"{trace.name} gives nothing: expected a tensor to compute")
    trace = _with_tensors(cleaned(trace.with_(outputs=outputs)))
    weights = dict(zip(trace.inputs, zip(held, program.held, strict=True), strict=False))
    if argument := next((v.name for v in trace.mutations if v not in weights), ""):
        raise MapError(f"the program writes to its argument {argument}; what is kept between runs must be a buffer")
    return Captured(trace, program.captured.mode, weights)


def _with_tensors(trace: Trace) -> Trace:
    """Without arguments that are no tensors, which the program has as they were: numbers, truth values, None."""
    read = {v for eqn in trace.equations for v in eqn.inputs()} | set(trace.results())
    return trace.with_(inputs=tuple(v for v in trace.inputs if isinstance(v.type, TensorType) or v in read))


def _from_file(net: Any, args: tuple, kwargs: dict) -> Captured:
    """The module of an ONNX file, whose numbers may decide sizes: it records itself."""
    graph = net.recorded(args, kwargs)
    named = {name: v for v, name in graph.inputs.items()}
    inputs = tuple(named[name] for name in (*net.input_names, *named) if name in named)
    outputs = tuple(v for _, v in graph.outputs)
    trace = graph.trace.with_(inputs=tuple(dict.fromkeys((*graph.weights, *inputs))), outputs=outputs)
    return Captured(cleaned(trace), graph.recorded.mode, graph.weights)


def cleaned(trace: Trace) -> Trace:
    """As inference begins, without what only gradients need."""
    for step in (inline, lambda t: canonicalise(t, differentiable=False), fold, cse, dce):
        trace = step(trace)
    return trace
