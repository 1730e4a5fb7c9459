"""A timeline of one rank's program: what it computes, what it exchanges, and how much of that nothing hides.

In: a final program and a `Machine`. Out: a `Timeline`. Equations run one after the other on the device, each for as
long as its arithmetic or its bytes take, whichever is more (`inspection/work.py`), and for as long as a kernel takes
that does nothing. None begins before the host has launched it: a program of small kernels is bound by its host. Both
count where the machine's description says what they take.
Exchanges run beside them, for as long as the link takes for their bytes, and a latency. What a rank copies to send it,
or to put together what came, is work of its device. Ranks that stand next to each other fill a box, inside of which the
machine's own links join them; between boxes each device has a link to the network. An exchange among whole boxes uses
all of theirs, in rings. What goes over one kind of link goes one after the other. Where a program waits, that time is
exposed, at some line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from tessera.inspection.work import rate, work
from tessera.ir.dist import Collective, axis_in, bytes_copied, bytes_sent, exchange_of, is_collective
from tessera.ir.equation import Equation, Special, Value, short_path
from tessera.ir.trace import Trace
from tessera.machines import Machine

LATENCY = 10e-6  # seconds, of an exchange
NETWORK = "link.network"


@dataclass
class Timeline:
    seconds: float = 0.0  # until the last equation is done
    computing: float = 0.0
    launching: float = 0.0  # seconds in which the device waits for the host
    exchanging: float = 0.0  # all exchanges together
    exposed: dict[str, float] = field(default_factory=dict)  # line -> seconds in which the device waits
    by_name: dict[str, float] = field(default_factory=dict)  # the same by collective
    taken: dict[str, float] = field(default_factory=dict)  # by collective, all that it takes, hidden or not

    @property
    def waiting(self) -> float:
        return sum(self.exposed.values())

    def __str__(self) -> str:
        work, all_, hidden = (1e3 * t for t in (self.computing, self.exchanging, self.exchanging - self.waiting))
        host = f", {1e3 * self.launching:.3f} of waiting for the host" if self.launching else ""
        sent = f"{all_:.3f} of exchanges, of which {hidden:.3f} hidden"
        head = f"{self.seconds * 1e3:.3f} ms: {work:.3f} of work{host}, {sent}"
        rows = sorted(self.exposed.items(), key=lambda row: -row[1])
        return "\n".join([head, *(f"  {seconds * 1e3:8.3f} ms exposed at {line}" for line, seconds in rows)])


@dataclass
class Clock:
    """When the device is done with what it was given, and the host with launching it; both run on from program to
    program."""

    machine: Machine
    device: float = 0.0
    host: float = 0.0
    launching: float = 0.0  # in which the device waited for the host

    def run(self, eqn: Equation) -> float:
        """Give an equation to the device; seconds that it takes there."""
        taken = _work(eqn, self.machine, False)
        self.host += _launch(eqn, self.machine)
        if taken:
            self.launching += max(0.0, self.host - self.device)
            self.device = max(self.device, self.host) + taken
        return taken

    def run_all(self, trace: Trace) -> float:
        """Run a program without its exchanges; when the device is done with it."""
        for eqn in trace.equations:
            self.run(eqn)
        return self.device


def timeline(trace: Trace, machine: Machine, link: str = "nvlink", fused: bool = False) -> Timeline:
    """What one rank does, on this machine with links of that kind. With `fused` arithmetic alone takes time, as if all
    that moves memory were part of other kernels: then what is exposed is the most that it can be."""
    told, clock = Timeline(), Clock(machine)
    free: dict[str, float] = {}  # when each kind of link has done what was given to it
    ends: dict[Value, float] = {}
    for eqn in trace.equations:
        if fused:
            taken = _work(eqn, machine, fused)
            clock.device += taken
        else:
            taken = clock.run(eqn)
        told.computing += taken
        now = clock.device
        if exchange_of(eqn) is not None:
            kind, taken = _exchange(eqn, machine, link)
            free[kind] = max(free.get(kind, 0.0), now) + taken
            told.exchanging += taken
            name = exchange_of(eqn)[0]  # type: ignore[index]
            told.taken[name] = told.taken.get(name, 0.0) + taken
            ends[eqn.out] = free[kind]
            end = now if is_collective(eqn, "begin") else free[kind]
        elif is_collective(eqn, "wait"):
            end = max(now, ends[eqn.inputs()[0]])
        else:
            continue
        if end > now:
            line = _line(eqn)
            told.exposed[line] = told.exposed.get(line, 0.0) + end - now
            what = str(eqn.args[2] if is_collective(eqn, "wait") else exchange_of(eqn)[0])  # type: ignore[index]
            told.by_name[what] = told.by_name.get(what, 0.0) + end - now
        clock.device = end
    told.seconds, told.launching = clock.device, clock.launching
    return told


def equation_seconds(eqn: Equation, machine: Machine, link: str = "nvlink", fused: bool = False) -> float:
    """What an equation takes by itself; to wait takes nothing."""
    if exchange_of(eqn) is not None:
        return _exchange(eqn, machine, link)[1]
    return 0.0 if is_collective(eqn, "wait") else _work(eqn, machine, fused)


def _exchange(eqn: Equation, machine: Machine, link: str) -> tuple[str, float]:
    """The kind of link that an exchange goes over, and for how long."""
    assert isinstance(eqn.op, Collective)
    name, args = exchange_of(eqn)  # type: ignore[misc]
    mesh, axis, sent = eqn.op.mesh, axis_in(args), bytes_sent(eqn)
    ranks, step = mesh.size(axis), prod(size for _, size in mesh.axes[mesh.names.index(axis) + 1 :])
    fast, box = machine[f"link.{link}"], int(machine["devices"]) if "devices" in machine else mesh.ranks
    if ranks * step <= box or NETWORK not in machine:
        return link, LATENCY + sent / fast
    near, slow = max(1, box // step), machine[NETWORK]  # so many of the ranks are in one box
    if name in ("all_to_all", "permute", "rows"):  # what leaves the box goes over the device's own link
        return NETWORK, LATENCY + sent * (ranks - near) / (ranks - 1) / slow
    return NETWORK, LATENCY + sent / min(fast, near * slow)


def _work(eqn: Equation, machine: Machine, fused: bool) -> float:
    """Of this rank's own device: what it moves or computes, and what any kernel takes."""
    if is_collective(eqn, "wait") or exchange_of(eqn) is not None:
        taken = 0.0 if fused else bytes_copied(eqn) / machine.bandwidth
    else:
        of = work(eqn)
        arithmetic = of.matrix_flops / rate(eqn, machine)
        if fused:
            return arithmetic
        taken = max(arithmetic + of.flops / machine.flops, of.bytes / machine.bandwidth)
    return taken + machine["kernel"] if taken and "kernel" in machine else taken


def _launch(eqn: Equation, machine: Machine) -> float:
    """Of the host, until an equation is on its way to the device; nothing where nobody measured that. A view is no
    kernel, and to wait for an exchange launches nothing."""
    region = isinstance(eqn.op, Special) and eqn.op.body is not None
    if is_collective(eqn, "wait") or (not region and exchange_of(eqn) is None and not work(eqn).bytes):
        return 0.0
    for figure in ("launch", "call") if region else ("call",):
        if figure in machine:
            return machine[figure]
    return 0.0


def _line(eqn: Equation) -> str:
    source = eqn.source
    return f"{short_path(source.file)}:{source.line}" if source.file else source.note or "an unknown line"
