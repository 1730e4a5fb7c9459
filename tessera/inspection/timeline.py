"""A timeline of one rank's program: what it computes, what it exchanges, and how much of that nothing hides.

In: a final program and a `Machine`. Out: a `Timeline`. Equations run one after the other on the device, each for as
long as its arithmetic or its bytes take, whichever is more; exchanges run beside them, one after the other, for as long
as the link takes for their bytes, and a latency. Where a program waits for one, that time is exposed, at some line.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.ir.dist import bytes_sent, exchange_of, is_collective
from tessera.ir.equation import Equation, Value, short_path
from tessera.ir.trace import Trace
from tessera.machines import Machine
from tessera.ops.op import bytes_moved, flops

LATENCY = 10e-6  # seconds, of an exchange


@dataclass
class Timeline:
    seconds: float = 0.0  # until the last equation is done
    computing: float = 0.0
    exchanging: float = 0.0  # all exchanges together
    exposed: dict[str, float] = field(default_factory=dict)  # line -> seconds in which the device waits

    @property
    def waiting(self) -> float:
        return sum(self.exposed.values())

    def __str__(self) -> str:
        work, all_, hidden = (1e3 * t for t in (self.computing, self.exchanging, self.exchanging - self.waiting))
        head = f"{self.seconds * 1e3:.3f} ms: {work:.3f} of work, {all_:.3f} of exchanges, of which {hidden:.3f} hidden"
        rows = sorted(self.exposed.items(), key=lambda row: -row[1])
        return "\n".join([head, *(f"  {seconds * 1e3:8.3f} ms exposed at {line}" for line, seconds in rows)])


def timeline(trace: Trace, machine: Machine, link: str = "nvlink") -> Timeline:
    """What one rank does, on this machine with links of that kind."""
    told, now, free = Timeline(), 0.0, 0.0
    ends: dict[Value, float] = {}
    for eqn in trace.equations:
        if exchange_of(eqn) is not None:
            taken = LATENCY + bytes_sent(eqn) / machine[f"link.{link}"]
            free = max(free, now) + taken
            told.exchanging += taken
            ends[eqn.out] = free
            end = now if is_collective(eqn, "begin") else free
        elif is_collective(eqn, "wait"):
            end = max(now, ends[eqn.inputs()[0]])
        else:
            taken = _work(eqn, machine)
            told.computing += taken
            now += taken
            continue
        if end > now:
            line = _line(eqn)
            told.exposed[line] = told.exposed.get(line, 0.0) + end - now
        now = end
    told.seconds = now
    return told


def _work(eqn: Equation, machine: Machine) -> float:
    return max(flops(eqn) / machine.matrix_flops, bytes_moved(eqn) / machine.bandwidth)


def _line(eqn: Equation) -> str:
    source = eqn.source
    return f"{short_path(source.file)}:{source.line}" if source.file else source.note or "an unknown line"
