"""Restores the strides that a trace says, where the kernel that runs chooses its own.

In: a final Trace. Out: the same with `tessera.laid_out` after every equation whose results lie as a library has it
(`ir/layouts.py`) and are read by somebody who takes their type's word. It looks at the strides when the program runs,
and copies only where they are others. So kernels that were compiled for these strides, and views of such a result, see
what they were promised on every machine, and whatever version of a library is installed.
"""

from __future__ import annotations

import torch

from tessera.ir.equation import Equation, Value, symbols_in, values_in
from tessera.ir.layouts import unpromised
from tessera.ir.rewrite import Rewrite
from tessera.ir.strides import LAID_OUT
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType


def lay_out(trace: Trace) -> Trace:
    """Every result whose strides nobody promises, behind a look at them."""
    if not any(map(unpromised, trace.equations)):
        return trace
    believed = _believed(trace)
    bound = {symbol for symbol, (v, _) in trace.symbols.items() if v in trace.inputs}
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        bound.update(symbol for symbol, (v, _) in trace.symbols.items() if v in eqn.results())
        looked_at = [v for v in eqn.results() if v in believed and _has_order(v)] if unpromised(eqn) else []
        # Strides by sizes that the program does not have cannot be told: they stay as the kernel has them.
        looked_at = [v for v in looked_at if symbols_in(v.tensor.stride) <= bound]
        if looked_at:
            given = {v: rewrite.builder.value(f"{v.name}_given", v.type) for v in looked_at}
            rewrite.keep(eqn.with_(outputs=tuple(given.get(v, v) for v in eqn.outputs)))  # type: ignore[call-overload]
            for v, before in given.items():
                args = (before, tuple(v.tensor.stride))
                rewrite.keep(Equation(LAID_OUT, args, {}, (v,), source=eqn.source, tags=eqn.tags))
    return rewrite.finish()


def _has_order(v: Value) -> bool:
    """More than one dimension: one alone can only lie in one way."""
    return isinstance(v.type, TensorType) and v.ndim > 1 and v.type.layout is torch.strided


def _believed(trace: Trace) -> set[Value]:
    """Values that somebody reads as their types have it: all but those that go only into such operators again, whose
    kernels look at the strides they are given."""
    readers = set(values_in(trace.outputs)) | set(trace.mutations.values())
    for eqn in trace.equations:
        if not unpromised(eqn):
            readers.update(eqn.inputs())
    return readers
