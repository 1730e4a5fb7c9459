"""What a frontend hands on: a Trace, and what its outputs share with its inputs.

A functional trace gives fresh results, but PyTorch programs may give back an input, or a view of one. Those
outputs are not computed by the trace: `aliased` says how each is made again from the real input, after the
input's own mutation has been carried out, so that identity, shared memory and autograd history are eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tessera.ir.alias import Ref
from tessera.ir.builder import Builder
from tessera.ir.equation import Special, Value, values_in
from tessera.ir.record import Keep, record_refs
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC, type_of

Step = tuple[OpOverload, tuple, dict, int | None]


@dataclass(frozen=True)
class Aliased:
    """Output = steps applied to input number `input`, one view after another."""

    input: int
    steps: tuple[Step, ...]

    def make(self, x: torch.Tensor) -> torch.Tensor:
        for op, args, kwargs, index in self.steps:
            out = op(x, *args, **kwargs)
            x = out if index is None else out[index]
        return x


@dataclass(frozen=True)
class Captured:
    trace: Trace
    spec: pytree.TreeSpec
    mode: FakeTensorMode
    aliased: dict[int, Aliased] = field(default_factory=dict)  # position among the outputs -> how
    requires_grad: tuple[bool, ...] = ()  # of each input


def capture(
    fn: Callable,
    fakes: list[object],
    names: list[str],
    keep: Keep,
    builder: Builder,
    locate: bool = True,
) -> Captured:
    """Record `fn(*fakes)`; outputs that share memory with an input are described, not computed."""
    trace, spec, refs, outputs = record_refs(fn, fakes, names, keep, builder, locate=locate)
    by_root = {id(refs[id(x)].root): i for i, x in enumerate(fakes) if isinstance(x, torch.Tensor)}
    aliased = {}
    for position, out in enumerate(outputs):
        if isinstance(out, torch.Tensor) and id(out) in refs and id(refs[id(out)].root) in by_root:
            source = by_root[id(refs[id(out)].root)]
            steps = _steps(refs[id(out)], fakes[source])
            if steps is not None:
                aliased[position] = Aliased(source, steps)
    trace = _numbers(trace, builder)
    grads = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in fakes)
    return Captured(trace, spec, builder.mode, aliased, grads)


NUMBER = Special("number", lambda n: n)


def _numbers(trace: Trace, builder: Builder) -> Trace:
    """Symbolic numbers among the outputs become values, so that outputs are values or plain constants."""
    outputs = [builder.record(NUMBER, (o,), {}, type_of(o)) if isinstance(o, SYMBOLIC) else o for o in trace.outputs]
    return trace.with_(equations=tuple(builder.equations), outputs=tuple(outputs))


def _steps(ref: Ref, source: object) -> tuple[Step, ...] | None:
    """The views that lead from the input to this tensor; None where one needs a value of the program."""
    steps: list[Step] = []
    while ref.view is not None:
        view = ref.view
        if values_in((view.args, view.kwargs)):
            return None
        steps.append((view.op, view.args, view.kwargs, view.index))
        ref = view.parent
    return tuple(reversed(steps)) if ref.tensor is source else None
