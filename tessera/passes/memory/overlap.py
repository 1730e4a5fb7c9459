"""Exchanges between ranks begin early and are waited for late.

In: one rank's program in its final order. Out: the same equations, with every exchange as a pair: `begin` stands as
early as its operand is there, `wait` just before the first reader. Gathers and sums are two queues, each begun in the
order of the program, so that a gather does not wait for a gradient that is not made yet. What has been begun and nobody
has read holds at most the window: two of the largest results. The program alone decides, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.dist import EXCHANGES, Collective, is_collective, on
from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.mode import mode_of
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType


def overlap(trace: Trace, room: int | None = None) -> Trace:
    """`room`: bytes of results that may be on their way at once; the largest alone always may."""
    exchanges = [e for e in trace.equations if is_collective(e, *EXCHANGES)]
    if not exchanges:
        return trace
    window = 2 * max(e.out.nbytes() for e in exchanges) if room is None else room
    return trace.with_(equations=tuple(_Order(trace, exchanges, window).run()))


class _Order:
    def __init__(self, trace: Trace, exchanges: list[Equation], window: int) -> None:
        self.trace, self.window = trace, window
        self.builder = Builder(trace.name, mode_of(trace))
        self.builder.reserve(trace.values())
        gathers = [e for e in exchanges if is_collective(e, "all_gather")]
        self.queues = [gathers, [e for e in exchanges if e not in gathers]]
        self.results = {e.out: e for e in exchanges}
        self.there: set[Value] = {*trace.inputs, *trace.constants}
        self.pending: dict[Value, Equation] = {}  # results that were begun -> what waits for them
        self.moving = 0

    def run(self) -> Iterator[Equation]:
        for eqn in self.trace.equations:
            yield from self.begun()
            if is_collective(eqn, *EXCHANGES):
                continue
            yield from self.needed(eqn.inputs())
            yield eqn
            self.there.update(eqn.results())
        yield from self.begun()
        yield from self.needed([*values_in(self.trace.outputs), *self.trace.mutations.values()])

    def begun(self) -> Iterator[Equation]:
        """Begin what is ready and has room, in order."""
        for queue in self.queues:
            while queue and queue[0].inputs()[0] in self.there and self.fits(queue[0]):
                yield self.begin(queue.pop(0))

    def fits(self, eqn: Equation) -> bool:
        return not self.pending or self.moving + eqn.out.nbytes() <= self.window

    def needed(self, values: list[Value]) -> Iterator[Equation]:
        """Wait for what is read now; what was not begun yet is begun, and all before it in its queue."""
        for v in dict.fromkeys(values):
            if v not in self.results or v in self.there:
                continue
            queue = next((q for q in self.queues if self.results[v] in q), [])
            while v not in self.pending:
                first = queue.pop(0)
                yield from self.needed(first.inputs())
                yield self.begin(first)
            yield self.pending.pop(v)
            self.moving -= v.nbytes()
            self.there.add(v)

    def begin(self, eqn: Equation) -> Equation:
        op = eqn.op
        assert isinstance(op, Collective)
        x, *args = eqn.args
        named = (x, op.name, *args)
        type_ = fake.infer(on(op.mesh).begin, named, {}, self.builder.mode)
        assert isinstance(type_, TensorType)
        coming = self.builder.value(f"{eqn.out.name}_coming", type_)
        self.pending[eqn.out] = eqn.with_(op=on(op.mesh).wait, args=(coming, *named))
        self.moving += eqn.out.nbytes()
        return eqn.with_(op=on(op.mesh).begin, args=named, outputs=(coming,))
