"""Exchanges between ranks begin early and are waited for late.

In: one rank's program in its final order. Out: the same equations, with every exchange as a pair: `begin` stands as
early as its operand is there, `wait` just before the first reader. Along each axis gathers, sums and others are queues,
each begun in the order of the program, so that a gather does not wait for a gradient that is not made yet. What of
gathers has been begun and nobody has read holds at most two of the largest results, and where most memory is used no
more than one. Sums hold two of the largest operands: where one more comes, the oldest is waited for, since its operand
takes more memory than its result; so is one that is there for certain. Pieces that are permuted were one value before.

Behind the last product nothing hides an exchange. What stands there and leads to one, such as an update of weights that
are gathered again, moves up to where all that it reads is there; a sum that it reads is waited for once products of
its length have passed. What leads to no product and no exchange, such as a loss that is only given back, is computed at
the end, and so nobody waits for it earlier. A gather that is read much later lets go first what somebody waits for. The
program alone decides, so all ranks decide alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.dist import EXCHANGES, OVER, ROWS, Collective, axis_in, bytes_sent, is_collective, on
from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.mode import mode_of
from tessera.ir.schema import has_effect, is_pointwise
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_hint
from tessera.ops.op import flops
from tessera.passes.memory.alias import Roots, roots, shown
from tessera.passes.memory.schedule import live_bytes


def overlap(trace: Trace, room: int | None = None) -> Trace:
    """`room`: bytes of results of one queue that may be on their way at once; the largest alone always may."""
    exchanges = [e for e in trace.equations if is_collective(e, *PAIRED)]
    if not exchanges:
        return trace
    of = roots(trace)
    levels = [during for during, _ in live_bytes(trace, of=of)]
    return trace.with_(equations=tuple(_Order(trace, exchanges, room, levels, of).run()))


PAIRED = (*EXCHANGES, ROWS)
GATHERS, SUMS = ("all_gather",), ("reduce_scatter", "all_reduce")
PRODUCT = 32  # operations an element that is read or made: what has more hides something
BOX, FAST, SLOW = 8, 2_200, 20_000  # ranks in a box; operations in the time of a byte inside of it, and between boxes
# Those are an H200's, whatever machine is at hand: 790 TFLOP/s beside 0.8 of 450 GB/s, and of 50 GB/s. Ranks may have
# different ones, and must begin exchanges in one order.
PAUSE = 3e10  # operations in the time that the smallest exchange takes, for certain
EARLY = 4  # times as long as it takes: what a gather needs between something urgent and its reader
LITTLE = 1 << 20  # bytes that may live until the end, for what is computed there


@dataclass
class _Unit:
    """An exchange behind the last product, and what leads to it there."""

    exchange: Equation
    cone: list[int]  # places of equations
    missing: set[Value]  # what they read that is not there yet


def is_product(eqn: Equation) -> bool:
    if is_collective(eqn) or is_pointwise(eqn.op) or (work := flops(eqn)) <= PRODUCT:
        return False
    sizes = [size_hint(v.numel()) for v in _tensors(eqn)]
    return bool(sizes) and work > PRODUCT * max(sizes)


def _units(trace: Trace, last: int) -> list[_Unit]:
    """The exchanges behind the last product; of those before it, nothing moves."""
    makers = {v: i for i, eqn in enumerate(trace.equations) if i > last for v in eqn.results()}
    units = []
    for eqn in trace.equations[last + 1 :]:
        if not is_collective(eqn, *PAIRED):
            continue
        cone, missing, stack, moves = set[int](), set[Value](), list(eqn.inputs()), True
        while stack:
            v = stack.pop()
            i = makers.get(v)
            if i is None or is_collective(trace.equations[i], *PAIRED):
                missing.add(v)
            elif i not in cone:
                cone.add(i)
                moves = moves and not has_effect(trace.equations[i])
                stack += trace.equations[i].inputs()
        if moves:
            units.append(_Unit(eqn, sorted(cone), missing))
    return units


def _aside(trace: Trace, products: Collection[int]) -> set[int]:
    """The places, before the last product, of equations that lead to no product and no exchange."""
    last = max(products, default=-1)
    useful: set[Value] = set()
    aside = set()
    for i in range(len(trace.equations) - 1, -1, -1):
        eqn = trace.equations[i]
        leads = i in products or is_collective(eqn, *PAIRED) or not useful.isdisjoint(eqn.results())
        if leads:
            useful.update(eqn.inputs())
        elif i < last and not has_effect(eqn) and sum(v.nbytes() for v in _tensors(eqn)) <= LITTLE:
            aside.add(i)
    return aside


def _own(trace: Trace, exchanges: list[Equation], of: Roots) -> set[Value]:
    """Operands of exchanges that only those read, and whose memory, all of it, nobody else sees."""
    readers = Counter(v for eqn in trace.equations for v in eqn.inputs())
    seen = Counter(root for v in of for root in of[v])
    given = shown([*trace.results(), *trace.mutations.values()], of)
    operands = {x for e in exchanges if readers[x := e.inputs()[0]] == 1 and of[x] == {x} and seen[x] == 1}
    return {x for x in operands - given - {*trace.inputs, *trace.constants} if x.tensor.is_row_major}


def _tensors(eqn: Equation) -> list[Value]:
    return [v for v in (*eqn.inputs(), *eqn.results()) if isinstance(v.type, TensorType)]


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
    def __init__(self, trace: Trace, exchanges: list[Equation], room: int | None, levels: list[int], of: Roots) -> None:
        self.trace, self.levels = trace, levels
        gathered = max((e.out.nbytes() for e in exchanges if is_collective(e, *GATHERS)), default=0)
        self.most = max(levels) + gathered if room is None else float("inf")
        self.place, self.places = 0, trace.places()
        self.builder = Builder(trace.name, mode_of(trace))
        self.builder.reserve(trace.values())
        self.own = _own(trace, exchanges, of)
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
        products = {i: e for i, e in enumerate(trace.equations) if is_product(e)}
        last = max(products, default=-1)
        self.work = {e.results()[0]: flops(e) for e in products.values()}
        self.aside, self.done = _aside(trace, products), set[int]()
        self.later: dict[Value, Equation] = {}  # results that are computed when somebody reads them, or at the end
        self.ready: deque[_Unit] = deque()
        self.units: dict[Value, list[_Unit]] = {}  # by what they miss
        self.late: set[Value] = set()  # results of units: nobody reads them before the end
        self.clock = 0.0  # operations of products so far
        self.urgent: defaultdict[str, deque[Value]] = defaultdict(deque)  # by axis, in order
        self.free: dict[str, float] = {}  # when the links along an axis have done what was given to them
        self.takes: dict[Value, float] = {e.out: taken(e) for e in exchanges}
        self.ends: dict[Value, float] = {}  # when what was begun is there
        for unit in _units(trace, last) if last >= 0 else ():
            unit.missing -= self.there
            self.late.add(unit.exchange.out)
            for v in unit.missing:
                self.units.setdefault(v, []).append(unit)
        self.read = self.readers(trace)  # when results are read first, if not at the end

    def run(self) -> Iterator[Equation]:
        for i, eqn in enumerate(self.trace.equations):
            self.place = i
            yield from self.begun()
            if is_collective(eqn, *PAIRED) or i in self.done:
                continue
            if i in self.aside and not self.there.issuperset(eqn.inputs()):
                self.later.update(dict.fromkeys(eqn.results(), eqn))
                continue
            self.done.add(i)
            yield from self.computed(eqn)
        yield from self.begun()
        while self.later:
            yield from self.put_off(next(iter(self.later)))
        yield from self.needed([*values_in(self.trace.outputs), *self.trace.mutations.values()])

    def readers(self, trace: Trace) -> dict[Value, float]:
        """When results of exchanges are read; those for which no product has time are urgent."""
        clock, computed, read = 0.0, dict[Value, float](), dict[Value, float]()
        for eqn in trace.equations:
            computed.update(dict.fromkeys(eqn.results(), clock))
            for v in eqn.inputs():
                if v in self.results and v not in read and v not in self.late:
                    read[v] = clock
                    if computed.get(self.results[v].inputs()[0]) == clock:
                        self.urgent[axis_in(self.results[v].args[1:])].append(v)
            clock += self.work.get(eqn.results()[0], 0.0) if eqn.results() else 0.0
        return read

    def put_off(self, v: Value) -> Iterator[Equation]:
        """Compute now what was left for later, if this value was."""
        eqn = self.later.get(v)
        if eqn is not None:
            for result in eqn.results():
                del self.later[result]
            yield from self.computed(eqn)

    def computed(self, eqn: Equation) -> Iterator[Equation]:
        for v in eqn.inputs():
            yield from self.put_off(v)
        yield from self.needed(eqn.inputs())
        yield eqn
        self.clock += self.work.get(eqn.results()[0], 0.0) if eqn.results() else 0.0
        self.arrived(eqn.results())

    def arrived(self, values: Iterable[Value]) -> None:
        for v in values:
            self.there.add(v)
            for unit in self.units.pop(v, ()):
                unit.missing.discard(v)
                if not unit.missing:
                    self.ready.append(unit)

    def begun(self) -> Iterator[Equation]:
        """Begin what is ready and has room, in order."""
        again = True
        while again:
            for queue in self.queues.values():
                if queue.begun or (queue.waiting and self.there.issuperset(queue.waiting[0].inputs())):
                    yield from self.begun_in(queue)
            again = bool(self.ready)
            while self.ready:
                yield from self.moved_up(self.ready.popleft())

    def begun_in(self, queue: _Queue) -> Iterator[Equation]:
        while queue.begun and self.is_over(queue, first := next(iter(queue.begun))):
            yield self.wait(queue, first)
        while queue.waiting and self.there.issuperset(queue.waiting[0].inputs()):
            while not queue.fits(queue.waiting[0]) and (queue.sums or self.late.issuperset(queue.begun)):
                yield self.wait(queue, next(iter(queue.begun)))
            if not queue.fits(queue.waiting[0]) or self.too_early(queue.waiting[0]) or self.too_much(queue.waiting[0]):
                break
            yield self.begin(queue, queue.waiting.popleft())

    def is_over(self, queue: _Queue, v: Value) -> bool:
        """Somebody behind the last product waits for it, and it should be there; or it is a sum that is there for
        certain, whose operand need not live on."""
        if queue.sums and self.ends[v] + self.takes[v] + PAUSE <= self.clock:
            return True
        return v in self.units and self.ends[v] <= self.clock

    def too_much(self, eqn: Equation) -> bool:
        """Until it is read, its result would live beside as much as ever lives at once, and one gathered more."""
        if not is_collective(eqn, *GATHERS) or eqn.out in self.late:
            return False
        until, size = self.places[eqn.out], eqn.out.nbytes()
        if max(self.levels[self.place : until], default=0) + size > self.most:
            return True
        for i in range(self.place, until):
            self.levels[i] += size
        return False

    def too_early(self, eqn: Equation) -> bool:
        """Something that is read at once comes first along the axis, and leaves time enough for this gather."""
        when = self.read.get(eqn.out)
        if when is None or not is_collective(eqn, *GATHERS):
            return False
        urgent = self.urgent[axis_in(eqn.args[1:])]
        while urgent and urgent[0] in self.ends:
            urgent.popleft()
        return bool(urgent) and urgent[0] is not eqn.out and when - self.read[urgent[0]] > EARLY * self.takes[eqn.out]

    def moved_up(self, unit: _Unit) -> Iterator[Equation]:
        """What leads to an exchange behind the last product; the exchange is the next of its queue."""
        queue = self.of[unit.exchange.out]
        if unit.exchange not in queue.waiting:
            return
        for i in unit.cone:
            if i not in self.done:
                self.done.add(i)
                yield from self.computed(self.trace.equations[i])
        queue.waiting.remove(unit.exchange)
        queue.waiting.appendleft(unit.exchange)

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
        self.arrived([v])
        return self.pending.pop(v)

    def begin(self, queue: _Queue, eqn: Equation) -> Equation:
        begin, self.pending[eqn.out] = paired(self.builder, eqn, eqn.inputs()[0] in self.own)
        axis = axis_in(eqn.args[1:])
        self.free[axis] = self.ends[eqn.out] = max(self.free.get(axis, 0.0), self.clock) + self.takes[eqn.out]
        queue.begun[eqn.out] = None
        queue.moving += queue.takes(eqn)
        return begin


def taken(eqn: Equation) -> float:
    """How long an exchange takes, in operations that a device does meanwhile. What holds for boxes of eight is enough:
    it says which of two things comes first, not when."""
    mesh, axis = eqn.op.mesh, axis_in(eqn.args[1:])  # type: ignore[union-attr]
    step = prod(size for _, size in mesh.axes[mesh.names.index(axis) + 1 :])
    inside = mesh.size(axis) * step <= BOX
    return bytes_sent(eqn) * (FAST if inside else max(FAST, SLOW / max(1, BOX // step)))


def paired(builder: Builder, eqn: Equation, own: bool = False) -> tuple[Equation, Equation]:
    """An exchange as what begins it and what waits for it. `own`: nobody else sees its operand's memory, so a sum may
    be written over it."""
    op = eqn.op
    assert isinstance(op, Collective)
    x, *args = eqn.args
    if own and op.name == "all_reduce":
        args = [*args, *("sum",) * (len(args) == 1), OVER]
    named = (x, op.name, *args)
    type_ = fake.infer(on(op.mesh).begin, named, {}, builder.mode)
    assert isinstance(type_, TensorType)
    coming = builder.value(f"{eqn.out.name}_coming", type_)
    begin = eqn.with_(op=on(op.mesh).begin, args=named, outputs=(coming,))
    return begin, eqn.with_(op=on(op.mesh).wait, args=(coming, *named))
