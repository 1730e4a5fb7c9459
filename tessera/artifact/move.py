"""A captured program on another kind of device: its types and the devices among its arguments, nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch

from tessera.frontends.captured import Captured
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType


def on_device(captured: Captured, source: str, device: torch.device) -> Captured:
    """What is on a device of the kind `source` is on `device`. No tensor is touched."""
    return replace(captured, trace=_Mover(source, device).trace(captured.trace))


class _Mover:
    def __init__(self, source: str, device: torch.device) -> None:
        self.source, self.device = source, device
        self.values: dict[Value, Value] = {}
        self.traces: dict[Trace, Trace] = {}

    def trace(self, t: Trace) -> Trace:
        if t not in self.traces:
            self.traces[t] = Trace(
                t.name,
                tuple(map(self.value, t.inputs)),
                tuple(map(self.equation, t.equations)),
                tuple(map(self.arg, t.outputs)),
                {self.value(a): self.value(b) for a, b in t.mutations.items()},
                {self.value(v): x for v, x in t.constants.items()},
                {s: (self.value(v), dim) for s, (v, dim) in t.symbols.items()},
            )
        return self.traces[t]

    def value(self, v: Value) -> Value:
        if v not in self.values:
            t = v.type
            moves = isinstance(t, TensorType) and t.device.type == self.source
            self.values[v] = Value(v.name, replace(t, device=self.device)) if moves else v  # type: ignore[type-var]
        return self.values[v]

    def equation(self, eqn: Equation) -> Equation:
        outputs = tuple(None if v is None else self.value(v) for v in eqn.outputs)
        kwargs = {k: self.arg(a) for k, a in eqn.kwargs.items()}
        return eqn.with_(args=tuple(map(self.arg, eqn.args)), kwargs=kwargs, outputs=outputs)

    def arg(self, a: Arg) -> Arg:
        if isinstance(a, Value):
            return self.value(a)
        if isinstance(a, torch.device):
            return self.device if a.type == self.source else a
        if isinstance(a, Trace):
            return self.trace(a)
        if isinstance(a, (list, tuple)):
            return type(a)(map(self.arg, a))
        if isinstance(a, dict):
            return {k: self.arg(x) for k, x in a.items()}
        return a
