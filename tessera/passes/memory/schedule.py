"""The order of equations.

`schedule` reorders a functional trace so that less memory is held at once: data dependencies, the order of effects and
the binding of run-time sizes are kept, and the predicted peak never grows. `peak_memory` predicts the bytes a trace
holds at once beyond its inputs.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

from tessera.ir.dist import ROWS, axis_in, is_collective
from tessera.ir.equation import Value
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ops.offload import TO_HOST
from tessera.passes.memory.alias import Roots, roots, shown
from tessera.passes.memory.depend import dependencies
from tessera.passes.memory.region_writes import plan_regions
from tessera.passes.memory.writes import plan

SUMS = ("reduce_scatter", "all_reduce")
IN_TURN = (*SUMS, "permute", "in_order", ROWS)


def schedule(trace: Trace, owned: Collection[Value] = ()) -> Trace:
    """The same equations in an order that holds less memory at its peak, or the trace itself. Inputs in `owned` are as
    in `peak_memory`."""
    of = roots(trace)
    memory = _Memory(trace, of, owned)
    graph = _Graph(trace, of)
    best: list[int] | range = range(len(trace.equations))
    least = memory.peak(best)
    # A greedy order that saw owned inputs die would make copies of them early, only to end them.
    for order in (graph.late(), graph.greedy(_Memory(trace, of) if owned else memory)):
        peak = memory.peak(order)
        if peak < least:
            best, least = order, peak
    return trace.with_(equations=tuple(trace.equations[i] for i in best)) if isinstance(best, list) else trace


def peak_memory(trace: Trace, owned: Collection[Value] = ()) -> int:
    """Bytes that the trace's own allocations reach at once; symbolic sizes count as their hints. Inputs in `owned` are
    the trace's too: they are there from the start and die with their last reader."""
    memory = _Memory(trace, roots(trace), owned)
    return max(memory.peak(range(len(trace.equations))), memory.given)


def live_bytes(trace: Trace, owned: Collection[Value] = (), of: Roots | None = None) -> list[tuple[int, int]]:
    """For each equation, the bytes of the trace's own allocations that live while it runs and after it."""
    memory = _Memory(trace, of or roots(trace), owned)
    return memory.steps(range(len(trace.equations)))


class _Memory:
    """What each equation allocates and which of the trace's own memory it touches. What waits on the host costs
    nothing here."""

    def __init__(self, trace: Trace, of: Roots, owned: Collection[Value] = ()) -> None:
        outside = {*trace.inputs, *trace.constants} - set(owned)
        self.size: dict[Value, int] = {v: v.nbytes() for v in owned}
        self.given = sum(self.size.values())  # bytes that are there before the first equation
        self.takes: list[int] = []
        self.touches: list[list[Value]] = []
        for eqn in trace.equations:
            taken = 0
            for v in eqn.outputs:
                if v is not None and v in of[v]:
                    self.size[v] = 0 if eqn.op is TO_HOST else v.nbytes()
                    taken += self.size[v]
            self.takes.append(taken)
            values = [*eqn.inputs(), *(v for v in eqn.outputs if v is not None)]
            self.touches.append([root for root in {r for v in values for r in of[v]} if root not in outside])
        self.held = shown(trace.results(), of) - outside

    def peak(self, order: list[int] | range) -> int:
        return max((during for during, _ in self.steps(order)), default=0)

    def steps(self, order: list[int] | range) -> list[tuple[int, int]]:
        """Bytes that live during each equation and after it, in this order."""
        last: dict[Value, int] = {}
        for place, index in enumerate(order):
            for root in self.touches[index]:
                last[root] = place
        gives = [0] * len(self.takes)
        for root, place in last.items():
            if root not in self.held:
                gives[place] += self.size[root]
        now, levels = self.given, []
        for place, index in enumerate(order):
            now += self.takes[index]
            levels.append((now, now - gives[place]))
            now -= gives[place]
        return levels


def _sends(trace: Trace) -> Iterator[tuple[int, int]]:
    """Sums along one axis keep their order, and so do pieces and rows that are sent or joined: while one is on its way,
    the next is computed. Put off, gradients of weights would all be made at the end, where nothing hides their sums."""
    last: dict[tuple[str, str], int] = {}
    for index, eqn in enumerate(trace.equations):
        if is_collective(eqn, *IN_TURN):
            kind = str(eqn.op).removeprefix("dist.")
            key = axis_in(eqn.args[1:]), "sum" if kind in SUMS else kind
            if key in last:
                yield last[key], index
            last[key] = index


class _Graph:
    """What must come before what, and two ways to put it in order."""

    def __init__(self, trace: Trace, of: Roots) -> None:
        self.trace = trace
        self.equations = trace.equations
        self.needs = dependencies(trace, of)
        for planned in (*plan(trace, of), *plan_regions(trace, of)):  # what can be written in place stays so
            for before, after in planned.waits:
                self.needs[after].add(before)
        for before, after in _sends(trace):
            self.needs[after].add(before)
        self.feeds: list[list[int]] = [[] for _ in self.equations]
        for index, needs in enumerate(self.needs):
            for need in needs:
                self.feeds[need].append(index)

    def late(self) -> list[int]:
        """Every equation as shortly before its first reader as possible, readers in their old order."""
        order: list[int] = []
        done = [False] * len(self.equations)
        wanted = set(self.trace.results())
        targets = [
            i
            for i, eqn in enumerate(self.equations)
            if not self.feeds[i] or has_effect(eqn) or not wanted.isdisjoint(eqn.outputs)
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
        return order

    def greedy(self, memory: _Memory) -> list[int]:
        """Always the ready equation that gives back most memory on balance; ties in the old order."""
        size, takes = memory.size, memory.takes
        reads = [[r for r in touched if r not in memory.held] for touched in memory.touches]
        readers: dict[Value, set[int]] = {}
        for index, touched in enumerate(reads):
            for root in touched:
                readers.setdefault(root, set()).add(index)

        def balance(index: int) -> int:
            return takes[index] - sum([size[r] for r in reads[index] if len(readers[r]) == 1])

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
        return order
