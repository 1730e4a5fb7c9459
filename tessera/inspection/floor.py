"""Where programs stand against their floor: the least time in which the machine moves and computes what they must.

In: final programs, or what a profile measured of them (`tools/profile/losses.py`). Out: a `Floor`, told in a few lines.
The floor is the sum of the equations' times by the roofline: a product's by the rate of products, others' by bytes over
the memory's rate. The measured time is the floor, every loss and the time outside equations together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from tessera.inspection.render import few
from tessera.inspection.work import main_device, work
from tessera.machines import machine_of
from tessera.pipeline.account import Program
from tessera.util.errors import OptionError
from tessera.util.units import duration

SHOWN = 3  # losses
NOT_MEASURED = "not measured: call tessera.profile(fast, *args) first, or run tessera explain --floor script.py"


@dataclass(frozen=True)
class Loss:
    """Time above the floor of equations that are alike: the same operators from the same lines, and as much work."""

    seconds: float  # of all of them
    count: int
    operators: tuple[str, ...]
    where: str  # the user's line
    program: str
    why: str

    def __str__(self) -> str:
        many = f"{self.count} × " if self.count > 1 else ""
        place = f" at {self.where}" if self.where else ""
        return f"{duration(self.seconds)}: {many}{few(self.operators)} ({self.program}){place}: {self.why}"


@dataclass(frozen=True)
class Floor:
    """Seconds of one step; without a measurement, of every program once."""

    machine: str = ""
    programs: dict[str, float] = field(default_factory=dict)  # "forward" -> its floor
    measured: float | None = None  # with nothing measured inside
    outside: float = 0.0  # of it, outside equations; on a GPU, outside their kernels
    losses: tuple[Loss, ...] = ()  # largest first; one below zero ran from a cache, faster than memory
    note: str = ""  # why there is no more to tell

    @property
    def seconds(self) -> float:
        return sum(self.programs.values())

    @property
    def ratio(self) -> float | None:
        return self.measured / self.seconds if self.measured is not None and self.seconds else None

    def to_dict(self) -> dict[str, object]:
        """Plain lists, dicts, strings and numbers."""
        return asdict(self) | {"seconds": self.seconds, "ratio": self.ratio}

    def lines(self) -> list[str]:
        if not self.machine:
            return [f"floor: {self.note}"]
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.programs.items())
        detail = f" ({parts})" if len(self.programs) > 1 else ""
        told = f"floor: {duration(self.seconds)}{detail} on {self.machine}"
        if self.measured is None:
            return [told, f"  {self.note}"]
        ratio = f", {self.ratio:.3g} times the floor" if self.ratio else ""
        lines = [f"{told}; measured {duration(self.measured)}{ratio}"]
        largest = [loss for loss in self.losses[:SHOWN] if loss.seconds > 0]
        if largest:
            lines += ["  largest losses:", *(f"    {loss}" for loss in largest)]
        if self.outside > 0:
            lines.append(f"  outside equations: {duration(self.outside)} (Python, autograd, launches)")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())


def predicted(programs: Iterable[Program]) -> Floor:
    """The floor of every program run once, by the description of the machine."""
    programs = list(programs)
    if not programs:
        return Floor(note="nothing is compiled, so there is none to tell")
    try:
        machine = machine_of(main_device(p.trace for p in programs))
    except OptionError as error:  # programs for a GPU that is not here
        return Floor(note=str(error))
    seconds: dict[str, float] = {}
    for p in programs:
        seconds[p.name] = seconds.get(p.name, 0.0) + sum(max(work(eqn).seconds(machine)) for eqn in p.trace.equations)
    return Floor(machine.name, seconds, note=NOT_MEASURED)
