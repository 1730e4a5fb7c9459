"""Writes through `.data` in a function that is differentiated while it is traced.

In: a trace, the values whose `.data` its program took, and those that autograd would follow. Out: nothing, or a
CaptureError; `torch.func` then runs the function.

A trace sees a detached view in `.data`, and differentiates every operator at what it read. Eager goes back to what it
saved, which such a write has changed without autograd knowing. Which tensors an operator saves, with a gradient or
without, is a matter of its formula, so a write after any differentiable use is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch

from tessera.ir.alias import KEEP_GRAD
from tessera.ir.equation import NO_GRAD, Value
from tessera.ir.record import recording
from tessera.ir.schema import is_view
from tessera.ir.trace import Trace
from tessera.torch_internals.autograd import TensorBase
from tessera.torch_internals.fake import FakeTensor
from tessera.util.errors import CaptureError
from tessera.util.files import PACKAGE

_INSIDE = (torch.__path__[0], PACKAGE)


def watched_data(_: object) -> property:
    """`Tensor.data` that notes for the builder whose it was."""
    plain: Any = TensorBase.data

    def get(self: torch.Tensor) -> torch.Tensor:
        recorder = recording()
        by_the_program = not sys._getframe(1).f_code.co_filename.startswith(_INSIDE)
        if recorder is not None and by_the_program and isinstance(self, FakeTensor) and id(self) in recorder.refs:
            recorder.builder.tags = recorder.tags()
            recorder.builder.data_taken.append(recorder.value(self))
        return plain.__get__(self)

    return property(get, plain.__set__)


def refuse_data_writes(trace: Trace, taken: Collection[Value], history: Collection[Value]) -> None:
    memory = _memory(trace)
    hidden, used = {memory.get(v, v) for v in taken}, set()
    for eqn in trace.equations:
        if eqn.op is KEEP_GRAD:
            if memory.get(eqn.args[0], eqn.args[0]) in hidden & used:  # type: ignore[arg-type]
                raise CaptureError(f"{eqn.source}: a write through .data, after a differentiable use of the tensor")
        elif not is_view(eqn.op) and NO_GRAD not in eqn.tags and any(v in history for v in eqn.results()):
            used |= {memory.get(v, v) for v in (*eqn.inputs(), *eqn.results())}


def _memory(trace: Trace) -> dict[Value, Value]:
    """For every view, and for what a hidden write leaves, the value whose memory it shows."""
    memory: dict[Value, Value] = {}
    for eqn in trace.equations:
        base = eqn.args[0] if eqn.args and (eqn.op is KEEP_GRAD or is_view(eqn.op)) else None
        if isinstance(base, Value):
            memory.update((v, memory.get(base, base)) for v in eqn.results())
    return memory
