"""Lets tensors that forward saves for backward wait on the host.

In: a forward and a backward, and which of the forward's outputs are saved. Out: the same two, where chosen tensors are
copied to the host in forward and back in backward. Names stay: `x` is defined in both. When a copy begins, and when it
is waited for, is for `prefetch` to say, once the equations have their final order:

    forward    x_copy = tessera.to_host(x)         right after x is made
               x_host = tessera.sent(x_copy, x)    after its last reader; returned in place of x
    backward   x_back = tessera.from_host(x_host)  before the first reader
               x = tessera.arrived(x_back)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from tessera.ir.builder import Builder
from tessera.ir.equation import NOWHERE, Equation, Source, Value, values_in
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.offload import ARRIVED, FROM_HOST, SENT, TO_HOST
from tessera.passes.memory.alias import last_touches, roots, shown
from tessera.passes.memory.prefetch import prefetch, window
from tessera.passes.memory.reinplace import reinplace
from tessera.passes.memory.schedule import peak_memory
from tessera.util.search import first_that_fits

LARGE = 2**20  # bytes of a tensor that is worth the way


@dataclass(frozen=True)
class Halves:
    """Forward's last outputs are `saved`, which are backward's first inputs."""

    forward: Trace
    backward: Trace
    saved: tuple[Value, ...]

    @property
    def results(self) -> int:
        """How many outputs of the forward are the caller's."""
        return len(self.forward.outputs) - len(self.saved)

    def own(self) -> list[Value]:
        """Saved tensors in memory of the device that lives for backward alone, and that no two of them share: not the
        caller's, not a view of an input, not on the host."""
        of = roots(self.forward)
        outside = [*self.forward.inputs, *self.forward.constants]
        taken = shown(
            (*outside, *values_in(self.forward.outputs[: self.results]), *self.forward.mutations.values()), of
        )
        taken |= {eqn.out for eqn in self.forward.equations if eqn.op is TO_HOST}
        tensors = [v for v in dict.fromkeys(self.saved) if isinstance(v.type, TensorType)]
        shares = Counter(root for v in tensors for root in of[v])
        return [v for v in tensors if all(shares[root] == 1 and root not in taken for root in of[v])]


def handed_over(forward: Trace, backward: Trace, results: int) -> list[Value]:
    """Inputs of the backward that the forward made for it alone; its first `results` outputs are the caller's."""
    saved = values_in(forward.outputs[results:])
    names = {v.name for v in Halves(forward, backward, tuple(saved)).own()}
    return [v for v in backward.inputs if v.name in names]


def candidates(halves: Halves) -> list[Value]:
    """Large saved tensors whose memory can be given up, longest unused first. Those that backward reads at once are not
    among them: they would come back before they had left."""
    first: dict[Value, int] = {}
    for index, eqn in enumerate(halves.backward.equations):
        for v in eqn.inputs():
            first.setdefault(v, index)
    end = len(halves.backward.equations)
    large = [v for v in halves.own() if v.tensor.nbytes() >= LARGE and v.tensor.is_dense]
    large.sort(key=lambda v: first.get(v, end))
    room = window(large)
    while large and large[0].tensor.nbytes() <= room:
        room -= large.pop(0).tensor.nbytes()
    return large[::-1]


def peak(halves: Halves) -> int:
    """Bytes that forward and backward are predicted to hold at once beyond their inputs, what is saved included, once
    the passes after this one have seen them."""
    forward, backward = (reinplace(prefetch(trace)) for trace in (halves.forward, halves.backward))
    return max(peak_memory(forward), peak_memory(backward, halves.own()))


def fitting(halves: Halves, order: Sequence[Value], budget: int) -> list[Value]:
    """The fewest of the first tensors of `order` with which the peak fits; all of them where it never does."""
    count = first_that_fits(len(order), lambda n: peak(offload(halves, order[:n])) <= budget)
    return list(order[:count])


def offload(halves: Halves, chosen: Collection[Value]) -> Halves:
    """Copy the chosen saved tensors to the host in forward, and back in backward."""
    if not chosen:
        return halves
    names = Builder("names")
    names.reserve([*halves.forward.values(), *halves.backward.values()])
    moved = {v: _Moved.of(v, names) for v in chosen}
    saved = tuple(moved[v].host if v in moved else v for v in halves.saved)
    forward = halves.forward.with_(
        equations=_leaving(halves.forward, moved), outputs=(*halves.forward.outputs[: halves.results], *saved)
    )
    backward = halves.backward
    symbols = {s: (moved[v].host if v in moved else v, dim) for s, (v, dim) in backward.symbols.items()}
    backward = backward.with_(
        inputs=tuple(moved[v].host if v in moved else v for v in backward.inputs),
        equations=_coming(backward, moved),
        symbols=symbols,
    )
    return Halves(forward, backward, saved)


@dataclass(frozen=True)
class _Moved:
    """A tensor and the names it goes by on its way."""

    value: Value
    copy: Value
    host: Value
    back: Value

    @staticmethod
    def of(v: Value, names: Builder) -> _Moved:
        there = replace(v.tensor, device=torch.device("cpu"), offset=0)
        return _Moved(
            v,
            names.value(f"{v.name}_copy", there),
            names.value(f"{v.name}_host", there),
            names.value(f"{v.name}_back", replace(v.tensor, offset=0)),
        )


def _leaving(trace: Trace, moved: dict[Value, _Moved]) -> tuple[Equation, ...]:
    """The forward's equations with copies to the host among them."""
    of = roots(trace)
    last = last_touches(trace.equations, of)
    done: dict[int, list[_Moved]] = {}
    for v, m in moved.items():
        if touches := [last[root] for root in of[v] if root in last]:
            done.setdefault(max(touches), []).append(m)
    equations: list[Equation] = []
    for index, eqn in enumerate(trace.equations):
        equations.append(eqn)
        source = _noted(eqn.source)
        for v in eqn.results():
            if v in moved:
                equations.append(Equation(TO_HOST, (v,), {}, (moved[v].copy,), source=source))
        for m in done.get(index, ()):
            equations.append(Equation(SENT, (m.copy, m.value), {}, (m.host,), source=_noted(NOWHERE)))
    return tuple(equations)


def _coming(trace: Trace, moved: dict[Value, _Moved]) -> tuple[Equation, ...]:
    """The backward's equations with copies from the host before their first readers."""
    waiting = dict(moved)
    equations: list[Equation] = []

    def bring(values: Sequence[Value]) -> None:
        for v in dict.fromkeys(values):
            if (m := waiting.pop(v, None)) is not None:
                source = _noted(NOWHERE)
                equations.append(Equation(FROM_HOST, (m.host, v.tensor.device), {}, (m.back,), source=source))
                equations.append(Equation(ARRIVED, (m.back,), {}, (v,), source=source))

    for eqn in trace.equations:
        bring(eqn.inputs())
        equations.append(eqn)
    bring(values_in(trace.outputs))
    return tuple(equations)


def _noted(source: Source) -> Source:
    return replace(source, note="offload")
