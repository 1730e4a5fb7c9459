"""Copies to and from the host begin early and are waited for late.

In: a trace in its final order, with the pairs of `ops/offload` anywhere in it. Out: the same equations, where

  - a copy to the host begins as soon as its tensor is made, and is waited for only once the tensors that stay for
    nothing but their copy hold more bytes than the window;
  - a copy from the host begins as soon as what has come, or is coming, and nobody has read yet leaves room in the
    window, and is waited for just before its first reader.

The window holds two of the largest tensors: one travels while the other is used. What the trace holds at once is what
its lifetimes say, copies included: the device's memory is given back in the program's own order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.trace import Trace
from tessera.ops.offload import ARRIVED, FROM_HOST, SENT, TO_HOST
from tessera.passes.memory.alias import last_touches, roots

MOVES = (TO_HOST, SENT, FROM_HOST, ARRIVED)


def window(values: Iterable[Value]) -> int:
    """Bytes that may be on their way at once."""
    return 2 * max((v.tensor.nbytes() for v in values), default=0)


def prefetch(trace: Trace, backward: Collection[Value] = ()) -> Trace:
    """Overlap copies with work. `backward` are values of the program's second half, where it has both: nothing is
    brought back before that begins."""
    if not any(eqn.op in MOVES for eqn in trace.equations):
        return trace
    return trace.with_(equations=tuple(_Order(trace, backward).run()))


class _Order:
    def __init__(self, trace: Trace, backward: Collection[Value]) -> None:
        self.rest = [eqn for eqn in trace.equations if eqn.op not in MOVES]
        by_op = {op: [eqn for eqn in trace.equations if eqn.op is op] for op in MOVES}
        self.begins = {_first(eqn): eqn for eqn in by_op[TO_HOST]}  # tensor -> its copy to the host
        self.sends = {_first(eqn): eqn for eqn in by_op[SENT]}  # copy -> what waits for it
        self.ends = {_first(eqn): eqn for eqn in by_op[ARRIVED]}  # what comes back -> what waits for it
        self.outward = window(self.begins)
        self.inward = window(eqn.out for eqn in by_op[FROM_HOST])
        self.order: list[Equation] = []
        self.leaving: list[Equation] = []  # copies that alone keep their tensors
        self.sent: set[Value] = set()
        self.unread = 0  # bytes brought, or on their way, that nobody has read
        self.first = self._first_readers(trace)
        self.last = self._last_readers(trace)
        self.coming = sorted(by_op[FROM_HOST], key=self._read_at)
        self.due: dict[int, list[Equation]] = {}  # first reader -> what comes back for it
        for fetch in self.coming:
            self.due.setdefault(self._read_at(fetch), []).append(fetch)
        self.begin = self._begin(set(backward))

    def _first_readers(self, trace: Trace) -> dict[Value, int]:
        first: dict[Value, int] = {}
        for index, eqn in enumerate(self.rest):
            for v in eqn.inputs():
                first.setdefault(v, index)
        for v in values_in(trace.outputs):
            first.setdefault(v, len(self.rest))
        return first

    def _last_readers(self, trace: Trace) -> dict[int, list[Equation]]:
        """Equation -> copies whose tensor's memory nothing after it touches."""
        of = roots(trace)
        last = last_touches(self.rest, of)
        copies: dict[int, list[Equation]] = {}
        for v, begin in self.begins.items():
            copies.setdefault(max((last.get(root, -1) for root in of[v]), default=-1), []).append(begin)
        return copies

    def _read_at(self, fetch: Equation) -> int:
        end = self.ends.get(fetch.out)
        return self.first.get(end.out, len(self.rest)) if end is not None else len(self.rest)

    def _begin(self, backward: set[Value]) -> int:
        """Where copies back may begin: at the first equation of the second half that computes from something."""
        if not backward:
            return 0
        there = (i for i, e in enumerate(self.rest) if e.inputs() and any(v in backward for v in e.results()))
        return next(there, len(self.rest))

    def run(self) -> list[Equation]:
        self._leave(-1)
        for index, eqn in enumerate(self.rest):
            self._come(index)
            self.order.append(eqn)
            for v in eqn.results():
                if v in self.begins:
                    self.order.append(self.begins[v])
            self._leave(index)
        self._come(len(self.rest))
        self._send(0)
        return self.order

    def _leave(self, index: int) -> None:
        """Equation `index` was the last reader of these; before the first, inputs that nobody reads."""
        if index < 0:
            defined = {v for eqn in self.rest for v in eqn.results()}
            self.order += [eqn for v, eqn in self.begins.items() if v not in defined]
        self.leaving += self.last.get(index, ())
        self._send(self.outward)

    def _send(self, room: int) -> None:
        """Wait for the oldest copies until the others fit."""
        while self.leaving and sum(_first(eqn).tensor.nbytes() for eqn in self.leaving) > room:
            self._wait(self.leaving.pop(0).out)

    def _wait(self, copy: Value) -> None:
        if copy in self.sends and copy not in self.sent:
            self.sent.add(copy)
            self.order.append(self.sends[copy])

    def _come(self, index: int) -> None:
        """Before equation `index`: begin what there is room for, wait for what it reads."""
        if self.coming and index >= self.begin:
            self._send(0)
        while self.coming and (self._read_at(self.coming[0]) <= index or index >= self.begin and self._room()):
            fetch = self.coming.pop(0)
            for copy, send in self.sends.items():
                if send.out is _first(fetch):
                    self._wait(copy)
            self.order.append(fetch)
            self.unread += fetch.out.tensor.nbytes()
        for fetch in self.due.get(index, ()):
            if fetch.out in self.ends:
                self.order.append(self.ends[fetch.out])
                self.unread -= fetch.out.tensor.nbytes()

    def _room(self) -> bool:
        return self.unread + self.coming[0].out.tensor.nbytes() <= self.inward


def _first(eqn: Equation) -> Value:
    v = eqn.args[0]
    assert isinstance(v, Value)
    return v
