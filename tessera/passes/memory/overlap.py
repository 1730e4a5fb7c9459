"""Exchanges between ranks begin early and are waited for late.

In: one rank's program in its final order. Out: the same equations, with every exchange as a pair: `begin` stands as
early as its operand is there, `wait` just before the first reader. Along each axis gathers, sums and others are queues,
each begun in the order of the program, so that a gather does not wait for a gradient that is not made yet. What of
gathers has been begun and nobody has read holds at most two of the largest results. Sums hold two of the largest
operands: where one more comes, the oldest is waited for, since its operand takes more memory than its result. Pieces
that are permuted were one value before. The program alone decides, so all ranks decide alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.dist import EXCHANGES, ROWS, Collective, axis_in, is_collective, on
from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.mode import mode_of
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType


def overlap(trace: Trace, room: int | None = None) -> Trace:
    """`room`: bytes of results of one queue that may be on their way at once; the largest alone always may."""
    exchanges = [e for e in trace.equations if is_collective(e, *PAIRED)]
    if not exchanges:
        return trace
    return trace.with_(equations=tuple(_Order(trace, exchanges, room).run()))


PAIRED = (*EXCHANGES, ROWS)
GATHERS, SUMS = ("all_gather",), ("reduce_scatter", "all_reduce")


@dataclass
class _Queue:
    """Exchanges that are begun one after the other."""

    sums: bool
    waiting: deque[Equation] = field(default_factory=deque)
    begun: dict[Value, None] = field(default_factory=dict)  # results that nobody has read, the oldest first
    window: float = 0
    moving: int = 0  # bytes of those

    def takes(self, eqn: Equation) -> int:
        """What an exchange holds while it is under way."""
        return eqn.inputs()[0].nbytes() if self.sums else eqn.out.nbytes()

    def fits(self, eqn: Equation) -> bool:
        return not self.begun or self.moving + self.takes(eqn) <= self.window


class _Order:
    def __init__(self, trace: Trace, exchanges: list[Equation], room: int | None) -> None:
        self.trace = trace
        self.builder = Builder(trace.name, mode_of(trace))
        self.builder.reserve(trace.values())
        self.queues: dict[tuple[str, str], _Queue] = {}
        self.of: dict[Value, _Queue] = {}  # results -> the queue of their exchange
        for e in exchanges:
            kind = "gathers" if is_collective(e, *GATHERS) else "sums" if is_collective(e, *SUMS) else "others"
            queue = self.of[e.out] = self.queues.setdefault((axis_in(e.args[1:]), kind), _Queue(kind == "sums"))
            queue.waiting.append(e)
            if room is not None:
                queue.window = room
            else:
                queue.window = float("inf") if is_collective(e, "permute") else max(queue.window, 2 * queue.takes(e))
        self.results = {e.out: e for e in exchanges}
        self.there: set[Value] = {*trace.inputs, *trace.constants}
        self.pending: dict[Value, Equation] = {}  # results that were begun -> what waits for them

    def run(self) -> Iterator[Equation]:
        for eqn in self.trace.equations:
            yield from self.begun()
            if is_collective(eqn, *PAIRED):
                continue
            yield from self.needed(eqn.inputs())
            yield eqn
            self.there.update(eqn.results())
        yield from self.begun()
        yield from self.needed([*values_in(self.trace.outputs), *self.trace.mutations.values()])

    def begun(self) -> Iterator[Equation]:
        """Begin what is ready and has room, in order."""
        for queue in self.queues.values():
            while queue.waiting and all(v in self.there for v in queue.waiting[0].inputs()):
                while queue.sums and not queue.fits(queue.waiting[0]):
                    yield self.wait(queue, next(iter(queue.begun)))
                if not queue.fits(queue.waiting[0]):
                    break
                yield self.begin(queue, queue.waiting.popleft())

    def needed(self, values: list[Value]) -> Iterator[Equation]:
        """Wait for what is read now; what was not begun yet is begun, and all before it in its queue."""
        for v in dict.fromkeys(values):
            if v not in self.results or v in self.there:
                continue
            queue = self.of[v]
            while v not in self.pending:
                first = queue.waiting.popleft()
                yield from self.needed(first.inputs())
                yield self.begin(queue, first)
            yield self.wait(queue, v)

    def wait(self, queue: _Queue, v: Value) -> Equation:
        del queue.begun[v]
        queue.moving -= queue.takes(self.results[v])
        self.there.add(v)
        return self.pending.pop(v)

    def begin(self, queue: _Queue, eqn: Equation) -> Equation:
        begin, self.pending[eqn.out] = paired(self.builder, eqn)
        queue.begun[eqn.out] = None
        queue.moving += queue.takes(eqn)
        return begin


def paired(builder: Builder, eqn: Equation) -> tuple[Equation, Equation]:
    """An exchange as what begins it and what waits for it."""
    op = eqn.op
    assert isinstance(op, Collective)
    x, *args = eqn.args
    named = (x, op.name, *args)
    type_ = fake.infer(on(op.mesh).begin, named, {}, builder.mode)
    assert isinstance(type_, TensorType)
    coming = builder.value(f"{eqn.out.name}_coming", type_)
    begin = eqn.with_(op=on(op.mesh).begin, args=named, outputs=(coming,))
    return begin, eqn.with_(op=on(op.mesh).wait, args=(coming, *named))
