"""What is exported: a Trace, and the names under which it leaves.

In: a captured program. Out: a `Program`, cleaned by the passes of inference, with the names of its weights, inputs,
outputs and sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tessera.ir.call import sub_traces
from tessera.ir.equation import Arg, Value
from tessera.ir.trace import Trace
from tessera.ir.types import Size, TensorType
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.passes.clean.fold import fold
from tessera.passes.clean.inline import inline
from tessera.torch_internals.fake import FakeTensorMode
from tessera.transforms.draws import is_draw

_SYMBOL = re.compile(r"[A-Za-z_]\w*")
_NARROW = (torch.float16, torch.bfloat16)  # the finer first


@dataclass(frozen=True)
class Program:
    trace: Trace
    mode: FakeTensorMode
    weights: Mapping[Value, tuple[str, torch.Tensor]]  # inputs that the file holds
    inputs: Mapping[Value, str]  # those that a caller brings
    outputs: Sequence[tuple[str, Arg]]
    sizes: Mapping[str, str] = field(default_factory=dict)  # symbol -> what the user calls it

    def size_name(self, size: Size) -> str:
        """A symbolic size in the user's words: `batch`, `2*length + 1`."""
        return _SYMBOL.sub(lambda m: self.sizes.get(m[0], m[0]), str(size))


def cleaned(trace: Trace) -> Trace:
    """As inference begins, without what only gradients need."""
    for step in (inline, _plain, fold, cse, dce):
        trace = step(trace)
    return trace


def _plain(trace: Trace) -> Trace:
    return canonicalise(trace, differentiable=False)


def random_values(trace: Trace) -> set[Value]:
    """What random numbers decide: it is another at every run."""
    random: set[Value] = set()
    for eqn in trace.equations:
        inside = any(map(random_inside, sub_traces(eqn)))
        if inside or is_draw(eqn) or not random.isdisjoint(eqn.inputs()):
            random.update(v for v in eqn.outputs if v is not None)
    return random


def narrowed_values(trace: Trace) -> dict[Value, torch.dtype]:
    """What is computed of numbers of sixteen bits, whatever it is kept in: as exact as these are."""
    narrow = {v: v.dtype for v in trace.inputs if isinstance(v.type, TensorType) and v.dtype in _NARROW}
    for eqn in trace.equations:
        tensors = [v for v in eqn.outputs if v is not None and isinstance(v.type, TensorType)]
        found = [narrow[v] for v in eqn.inputs() if v in narrow]
        found += [v.dtype for v in tensors if v.dtype in _NARROW]
        if found:
            coarsest = max(found, key=_NARROW.index)
            narrow.update((v, coarsest) for v in tensors)
    return narrow


def random_inside(trace: Trace) -> bool:
    """Whether anything is drawn, in bodies too."""
    return any(is_draw(e) or any(map(random_inside, sub_traces(e))) for e in trace.equations)


def updated(name: str) -> str:
    """The output that holds what an input, or a buffer, becomes."""
    return f"{name}.updated"
