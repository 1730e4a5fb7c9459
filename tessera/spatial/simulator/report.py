"""What a run cost: cycles, busy time, bytes and energy, all counted from the listing.

In: works, flows and claims of a program that was accepted. Out: a `Report`; `print` it, or take its `data()` as JSON.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.listing.types import FromHost, Hosted, Load, Send, Store, ToHost
from tessera.spatial.simulator.claims import Claims
from tessera.spatial.simulator.flows import Flow
from tessera.spatial.simulator.work import Work


@dataclass
class Report:
    cycles: int
    seconds: float
    instructions: int
    busy: dict[str, int]  # "0,1 matrix" -> cycles
    macs: dict[str, int]  # by type
    bytes: dict[str, int]  # sram read, sram written, link, chip link, dram, host
    energy: dict[str, float] | None  # in picojoules
    unknown: list[str] = field(default_factory=list)  # what the machine's file has no energy for
    host: dict[str, dict[str, int]] = field(default_factory=dict)  # operator that the host ran -> calls, bytes, cycles

    @property
    def joules(self) -> float | None:
        return None if self.energy is None else sum(self.energy.values()) * 1e-12

    def of_runs(self, count: int, every: int) -> Report:
        """Of so many runs, each so many cycles after the one before it."""
        if count == 1:
            return self
        cycles = self.cycles + (count - 1) * every
        times = lambda of: {name: count * value for name, value in of.items()}  # noqa: E731
        return replace(
            self, cycles=cycles, seconds=self.seconds * cycles / max(self.cycles, 1),
            instructions=count * self.instructions, busy=times(self.busy), macs=times(self.macs),
            bytes=times(self.bytes), energy=None if self.energy is None else times(self.energy),
            host={op: times(of) for op, of in self.host.items()},
        )  # fmt: skip

    def utilisation(self) -> dict[str, float]:
        """The share of the program's time in which a unit, a port, a bank or a link is busy."""
        return {name: cycles / self.cycles for name, cycles in self.busy.items()} if self.cycles else {}

    def data(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "cycles": self.cycles,
            "seconds": self.seconds,
            "instructions": self.instructions,
            "macs": self.macs,
            "bytes": self.bytes,
            "energy_pj": self.energy,
            "no_energy_for": self.unknown,
            "host": self.host,
            "utilisation": self.utilisation(),
        }

    def __str__(self) -> str:
        lines = [f"{self.cycles:,} cycles, {self.seconds * 1e6:.3f} µs, {self.instructions:,} instructions"]
        lines += [f"  {'macs':<8}{kind:<16}{count:>16,}" for kind, count in self.macs.items()]
        lines += [f"  {'bytes':<8}{kind:<16}{count:>16,}" for kind, count in self.bytes.items()]
        for op, of in self.host.items():
            lines.append(f"  {'host':<8}{op}: {of['calls']} calls, {of['bytes']:,} bytes, {of['cycles']:,} cycles")
        if self.energy is not None:
            lines += [f"  {'pJ':<8}{kind:<16}{value:>16,.1f}" for kind, value in self.energy.items()]
            lines += [f"  no energy is known for {', '.join(self.unknown)}"] if self.unknown else []
        top = sorted(self.utilisation().items(), key=lambda item: -item[1])[:8]
        return "\n".join([*lines, *(f"  {'busy':<8}{name:<24}{share:>8.1%}" for name, share in top)])


def report(
    machine: SpatialMachine, works: Iterable[Work], flows: Mapping[int, Flow], held: Claims, cycles: int
) -> Report:
    macs: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    host: dict[str, Counter[str]] = {}
    number = 0
    for work in works:
        number += 1
        if work.macs:
            macs[work.reads[0].dtype] += work.macs
        moved["sram read"] += work.read_bytes
        moved["sram written"] += work.written_bytes
        match work.step.of.action:
            case Send():
                for link in flows[id(work)].held:
                    moved["link" if link.source.chip == link.target.chip else "chip link"] += work.read_bytes
            case FromHost() | ToHost():
                moved["host"] += work.place.bytes if work.place else 0
            case Load() | Store():
                moved["dram"] += work.place.bytes if work.place else 0
            case Hosted(_, op, _):
                of = {"calls": 1, "bytes": work.host_bytes, "cycles": work.step.of.duration}
                host.setdefault(op, Counter()).update(of)
    busy: dict[str, int] = defaultdict(int)
    for resource, users in held.items():
        name = resource.name if resource.kind == "link" else f"{resource.core} {resource.name}"
        busy[name] = sum(claim.end - claim.begin for claim in users)
    energy, unknown = _energy(machine, macs, moved)
    asked = {op: dict(of) for op, of in host.items()}
    seconds = cycles / machine.chip.clock
    return Report(cycles, seconds, number, dict(busy), dict(macs), dict(moved), energy, unknown, asked)


def _energy(
    machine: SpatialMachine, macs: Counter[str], moved: Counter[str]
) -> tuple[dict[str, float] | None, list[str]]:
    if machine.energy is None:
        return None, []
    of = machine.energy
    known = {f"mac {kind}": of.mac[kind] * count for kind, count in macs.items() if kind in of.mac}
    known["sram"] = of.sram * (moved["sram read"] + moved["sram written"])
    known |= {"link": of.link * moved["link"], "chip link": of.chip_link * moved["chip link"]}
    known["dram"] = of.dram * moved["dram"]
    unknown = [f"mac {kind}" for kind in macs if kind not in of.mac]
    unknown += [name for name, value in (("dram", of.dram), ("chip link", of.chip_link)) if moved[name] and not value]
    return {name: value for name, value in known.items() if value}, unknown
