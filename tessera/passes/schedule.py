"""The order of equations and the lives of values.

`schedule` reorders a functional trace so that less memory is held at once: data dependencies, the order of
effects and the binding of run-time sizes are kept, and the predicted peak never grows. `lifetimes` says which
values die after which equation. `peak_memory` predicts the bytes a trace holds at once beyond its inputs.
"""

from __future__ import annotations

import heapq

from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.alias import Roots, roots
from tessera.passes.depend import dependencies
from tessera.passes.writes import plan


def schedule(trace: Trace) -> Trace:
    """The same equations in an order that holds less memory at its peak, or the trace itself."""
    of = roots(trace)
    graph = _Graph(trace, of)
    best, least = trace, peak_memory(trace, of)
    for order in (graph.late(), graph.greedy()):
        candidate = trace.with_(equations=tuple(order))
        peak = peak_memory(candidate, of)
        if peak < least:
            best, least = candidate, peak
    return best


def lifetimes(trace: Trace, inputs: bool = False) -> dict[int, list[Value]]:
    """Equation index -> the values that nothing reads after it; those of inputs too where asked."""
    kept = {*values_in(trace.outputs), *trace.mutations, *trace.mutations.values()}
    last: dict[Value, int] = {}
    for index, eqn in enumerate(trace.equations):
        for v in eqn.outputs:
            if v is not None:
                last[v] = index
        for v in eqn.inputs():
            last[v] = index
    own = {v for eqn in trace.equations for v in eqn.outputs}
    if inputs:
        own.update(trace.inputs)
    dead: dict[int, list[Value]] = {}
    for v, index in last.items():
        if v in own and v not in kept:
            dead.setdefault(index, []).append(v)
    return dead


def peak_memory(trace: Trace, of: Roots | None = None) -> int:
    """Bytes that the trace's own allocations reach at once; symbolic sizes count as their hints."""
    of = of if of is not None else roots(trace)
    outside = {*trace.inputs, *trace.constants}
    last: dict[Value, int] = {}
    for index, eqn in enumerate(trace.equations):
        for v in (*eqn.results(), *eqn.inputs()):
            for root in of[v]:
                last[root] = index
    end = len(trace.equations)
    for v in trace.results():
        for root in of[v]:
            last[root] = end
    dies: dict[int, list[Value]] = {}
    for root, index in last.items():
        dies.setdefault(index, []).append(root)
    now = peak = 0
    for index, eqn in enumerate(trace.equations):
        now += sum(nbytes(v) for v in eqn.results() if v in of[v])
        peak = max(peak, now)
        now -= sum(nbytes(root) for root in dies.get(index, ()) if root not in outside)
    return peak


def nbytes(v: Value) -> int:
    return v.type.nbytes() if isinstance(v.type, TensorType) else 0


class _Graph:
    """What must come before what, and what each equation takes and gives back."""

    def __init__(self, trace: Trace, of: Roots) -> None:
        self.trace, self.of = trace, of
        self.equations = trace.equations
        self.needs = dependencies(trace, of)
        for planned in plan(trace, of):  # an input that can be written in place stays one that can
            for before, after in planned.waits:
                self.needs[after].add(before)
        self.feeds: list[list[int]] = [[] for _ in self.equations]
        for index, needs in enumerate(self.needs):
            for need in needs:
                self.feeds[need].append(index)

    def late(self) -> list[Equation]:
        """Every equation as shortly before its first reader as possible, readers in their old order."""
        order: list[int] = []
        done = [False] * len(self.equations)
        wanted = {v for v in self.trace.results()}
        targets = [
            i for i, e in enumerate(self.equations) if has_effect(e.op) or not self.feeds[i] or wanted & {*e.results()}
        ]
        for target in targets:
            stack = [target]
            while stack:
                index = stack[-1]
                missing = [] if done[index] else sorted(i for i in self.needs[index] if not done[i])
                if missing:
                    stack.extend(reversed(missing))
                    continue
                stack.pop()
                if not done[index]:
                    done[index] = True
                    order.append(index)
        return [self.equations[i] for i in order]

    def greedy(self) -> list[Equation]:
        """Always the ready equation that gives back most memory on balance; ties in the old order."""
        readers: dict[Value, set[int]] = {}
        held = {root for v in self.trace.results() for root in self.of[v]}
        outside = {*self.trace.inputs, *self.trace.constants}
        reads: list[set[Value]] = []
        for index, eqn in enumerate(self.equations):
            touched = {root for v in (*eqn.inputs(), *eqn.results()) for root in self.of[v]}
            touched -= held | outside
            reads.append(touched)
            for root in touched:
                readers.setdefault(root, set()).add(index)
        takes = [sum(nbytes(v) for v in eqn.results() if v in self.of[v]) for eqn in self.equations]

        def balance(index: int) -> int:
            return takes[index] - sum(nbytes(r) for r in reads[index] if len(readers[r]) == 1)

        waiting = [len(needs) for needs in self.needs]
        ready = [(balance(i), i) for i, n in enumerate(waiting) if n == 0]
        heapq.heapify(ready)
        done = [False] * len(self.equations)
        order: list[int] = []
        while ready:
            cost, index = heapq.heappop(ready)
            if done[index]:
                continue
            now = balance(index)
            if now != cost:  # its turn has moved since it was put in
                heapq.heappush(ready, (now, index))
                continue
            done[index] = True
            order.append(index)
            for follower in self.feeds[index]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    heapq.heappush(ready, (balance(follower), follower))
            for root in reads[index]:
                readers[root].discard(index)
                if len(readers[root]) == 1:  # its last reader has become cheaper
                    (only,) = readers[root]
                    if waiting[only] == 0 and not done[only]:
                        heapq.heappush(ready, (balance(only), only))
        return [self.equations[i] for i in order]
