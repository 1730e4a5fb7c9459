"""A graph that is called: its plan, its state, and the programs of its parts.

In: values by the names of the file. Out: those of the graph's outputs. Parts run one after the other; a part that
turns out not to become one program is split (`frontends/onnx/segments.py`), and the call goes on with the first piece
of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from tessera.frontends.onnx.importer import Importer
from tessera.frontends.onnx.interpreter import Interpreter, Scope
from tessera.frontends.onnx.limits import Limits
from tessera.frontends.onnx.segments import Plan
from tessera.frontends.onnx.structure import Model
from tessera.ir.record import recording
from tessera.just_in_time.backend import Backend
from tessera.onnx.program import Compiler
from tessera.onnx.state import State
from tessera.pipeline.options import Options


class RunningGraph:
    def __init__(self, model: Model, state: State, limits: Limits, compiles: bool, options: Options) -> None:
        self.model, self.state, self.limits, self.compiles = model, state, limits, compiles
        graph = model.graph
        self.inputs = tuple(v.name for v in graph.inputs if v.name not in graph.initializers)
        self.outputs = tuple(v.name for v in graph.outputs)
        self.infos = {v.name: v for v in graph.inputs}
        self.held = sum(x.nbytes for x in graph.initializers.values() if isinstance(x, torch.Tensor))
        self.backend = Backend(options, name=re.sub(r"\W", "_", graph.name[:60]).strip("_") or "graph")
        self.reset()

    def reset(self) -> None:
        """Begin anew, without programs."""
        self.plan = Plan(self.model.graph)
        self.compiler = Compiler(self.model, self.state, self.limits, self.plan, self.backend, self.infos)

    def __call__(self, values: dict[str, object]) -> tuple[object, ...]:
        device = self.device(values)
        if recording() is not None or torch.compiler.is_exporting():  # inside a transform, which traces it
            return self.direct(Importer(self.model, self.limits.given(self.bytes(values)), device), values)
        limits = self.compiler.limits = self.limits.given(self.bytes(values))
        if not self.compiles:
            return self.direct(Interpreter(self.model, limits, device, self.compiler.foreseen), values)
        place, parts = 0, self.plan.parts
        while place < len(parts):
            results = self.compiler.call(parts[place], values, device)
            if results is not None:  # otherwise the part was split, and its first piece stands here now
                values.update(results)
                place += 1
        return tuple(values[name] if name in values else self.state[name] for name in self.outputs)

    def direct(self, interpreter: Interpreter, values: dict[str, object]) -> tuple[object, ...]:
        """Every node, one by one."""
        named = self.values(interpreter, values)
        return tuple(named[name] for name in self.outputs)

    def values(self, interpreter: Interpreter, values: dict[str, object]) -> dict[str, object]:
        """What every node gives, by name, beside what is given and held."""
        scope = Scope(self.model.opsets, graph=self.model.graph)
        scope.values.update({n: self.state[n] for n in self.model.graph.initializers if n not in values})
        scope.values.update(values)
        for node in self.model.graph.nodes:
            interpreter.run_node(node, scope)
        return scope.values

    def bytes(self, values: Mapping[str, object]) -> int:
        """Of the weights and of these arguments."""
        return self.held + sum(x.numel() * x.element_size() for x in values.values() if isinstance(x, torch.Tensor))

    def device(self, values: Mapping[str, object]) -> torch.device:
        for x in values.values():
            if isinstance(x, torch.Tensor):
                return x.device
        return self.state.device() or torch.device("cpu")
