"""What a program uses, as numbers: JSON and Prometheus text.

In: a program of `map_onto`. Out: `Metrics`: the share of the time in which every unit, port, bank and link is busy, the
memory of every core at its fullest, the gap to the bound by cause, the share that is used of the machine's
multiplications and of its memory's bandwidth, energy.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.listing.types import CorePage
from tessera.spatial.program import SpatialProgram
from tessera.spatial.simulator.judge import Judged, judge
from tessera.spatial.simulator.report import Report
from tessera.spatial.watch.gap import split
from tessera.spatial.watch.waits import Waits


@dataclass(frozen=True)
class Metrics:
    machine: str
    cycles: int
    bound: int
    limit: int
    busy: dict[tuple[str, str, str], float]  # (kind, core, name) -> share of the time
    memory: dict[str, tuple[int, int]]  # core -> bytes at its fullest, bytes there are
    gap: dict[str, int]  # cycles by cause; they add up to cycles - bound
    matrix_use: float  # multiplications over what all arrays could do in the time
    memory_use: float  # bytes read over what all read ports could give in the time
    report: Report

    def joules_a_token(self, tokens: int) -> float | None:
        return None if self.report.joules is None else self.report.joules / tokens

    def data(self) -> dict[str, object]:
        """As JSON has it."""
        busy: dict[str, dict[str, float]] = {}
        for (kind, core, name), share in self.busy.items():
            busy.setdefault(kind, {})[name if kind == "link" else f"{core} {name}"] = share
        memory = {core: {"fullest": most, "size": size} for core, (most, size) in self.memory.items()}
        return {
            "machine": self.machine, "cycles": self.cycles, "bound": self.bound, "limit": self.limit, "busy": busy,
            "memory": memory, "gap": self.gap, "matrix_use": self.matrix_use, "memory_use": self.memory_use,
            "macs": self.report.macs, "bytes": self.report.bytes, "energy_pj": self.report.energy,
            "seconds": self.report.seconds,
        }  # fmt: skip

    def prometheus(self) -> str:
        """As Prometheus reads it: one line a number, `tessera_spatial_…{machine="toy",…} value`."""
        rows: list[tuple[str, str, dict[str, str], float]] = [
            ("cycles", "cycles of a run", {}, self.cycles),
            ("bound_cycles", "cycles that no schedule of these tiles beats", {}, self.bound),
            ("limit_cycles", "cycles that no mapping beats", {}, self.limit),
            ("seconds", "of a run", {}, self.report.seconds),
            ("matrix_use_ratio", "multiplications over what all arrays could do", {}, self.matrix_use),
            ("memory_use_ratio", "bytes read over what all read ports could give", {}, self.memory_use),
        ]
        rows += [("gap_cycles", "cycles over the bound, by cause", {"cause": c}, n) for c, n in self.gap.items()]
        for (kind, core, name), share in self.busy.items():
            rows.append(("busy_ratio", "share of the time", {"kind": kind, "core": core, "name": name}, share))
        for core, (most, size) in self.memory.items():
            rows.append(("memory_bytes", "at its fullest, and in all", {"core": core, "of": "fullest"}, most))
            rows.append(("memory_bytes", "at its fullest, and in all", {"core": core, "of": "size"}, size))
        rows += [("moved_bytes", "by where", {"kind": k}, n) for k, n in self.report.bytes.items()]
        rows += [("multiplications", "by type", {"dtype": k}, n) for k, n in self.report.macs.items()]
        rows += [("energy_joules", "by part", {"part": k}, pj * 1e-12) for k, pj in (self.report.energy or {}).items()]
        return _prometheus(rows, self.machine)

    def __str__(self) -> str:
        lines = [f"{self.cycles:,} cycles, bound {self.bound:,}, limit {self.limit:,} on {self.machine}"]
        lines += [f"  gap     {cause:<12}{cycles:>10,}" for cause, cycles in self.gap.items()]
        lines += [f"  use     matrix {self.matrix_use:.1%}, memory {self.memory_use:.1%}"]
        top = sorted(self.busy.items(), key=lambda item: -item[1])[:8]
        lines += [f"  busy    {kind} {name if kind == 'link' else f'{core} {name}':<20}{share:>8.1%}"
                  for (kind, core, name), share in top]  # fmt: skip
        return "\n".join(lines)


def metrics(program: SpatialProgram, judged: Judged | None = None) -> Metrics:
    """What a program uses; the simulator's judgement may be given where it is known."""
    machine = program.machine
    judged = judged or judge(program.listing, machine)
    report, cycles = judged.report, program.cycles
    busy = {
        (resource.kind, str(resource.core), resource.name): sum(c.end - c.begin for c in users) / max(cycles, 1)
        for resource, users in sorted(judged.claims.items())
    }
    memory = {str(page.core): (fullest(page, cycles), machine.sram.size) for page in program.listing.pages}
    return Metrics(
        machine.key, cycles, program.bound, program.limit, busy, memory, split(Waits(judged), cycles, program.bound),
        _matrix_use(machine, report, program), _memory_use(machine, report, program), report,
    )  # fmt: skip


def levels(page: CorePage, cycles: int) -> list[tuple[int, int]]:
    """Bytes in use of a core's memory, from each cycle at which that changes."""
    changes: dict[int, int] = {}
    for buffer in page.buffers:
        begin, end = buffer.lifetime or (0, cycles)
        changes[begin] = changes.get(begin, 0) + buffer.size
        changes[end] = changes.get(end, 0) - buffer.size
    level, levels = 0, []
    for cycle in sorted(changes):
        level += changes[cycle]
        levels.append((cycle, level))
    return levels


def fullest(page: CorePage, cycles: int) -> int:
    return max((level for _, level in levels(page, cycles)), default=0)


def _cores(program: SpatialProgram) -> int:
    """Of all chips that the program uses, idle ones as well."""
    chips = {page.core.chip for page in program.listing.pages}
    return sum(len(program.machine.cores(chip)) for chip in chips)


def _matrix_use(machine: SpatialMachine, report: Report, program: SpatialProgram) -> float:
    of = machine.matrix
    needed = sum(count * of.passes.get(dtype, 1) for dtype, count in report.macs.items())
    there = report.cycles * _cores(program) * of.count * of.rows * of.columns
    return needed / there if there else 0.0


def _memory_use(machine: SpatialMachine, report: Report, program: SpatialProgram) -> float:
    there = report.cycles * _cores(program) * machine.sram.read_ports * machine.sram.width
    return report.bytes.get("sram read", 0) / there if there else 0.0


def _prometheus(rows: list[tuple[str, str, dict[str, str], float]], machine: str) -> str:
    lines: list[str] = []
    named = ""
    for name, about, labels, value in rows:
        if name != named:
            lines += [f"# HELP tessera_spatial_{name} {about}", f"# TYPE tessera_spatial_{name} gauge"]
            named = name
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in {"machine": machine, **labels}.items())
        lines.append(f"tessera_spatial_{name}{{{pairs}}} {value:.12g}")
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
