"""What a benchmark hands back: rows, each a contestant's samples beside the peer and the limit it is held to.

`rows` makes them from samples and targets; `table` shows them to people and `to_json` to programs. An `Outcome` is
what any suite gives to the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from rich.markup import escape
from rich.table import Table

from tessera.tools.bench.measure import Samples, ratio
from tessera.tools.machine import Machine

SCALE = {"ms": 1e3, "µs": 1e6, "nodes": 1, "kernels": 1}


@dataclass(frozen=True)
class Target:
    """At most so many times the peer's cost or, without a peer, so many of the section's units."""

    at_most: float
    peer: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a suite hands to the command line. `missed`: some target was not met, or some result was wrong."""

    note: str  # how it was measured, beside the machine
    table: Table
    rows: list[dict[str, object]]
    missed: bool
    document: dict[str, object] | None = None  # what `--json` writes, where that is not the rows


@dataclass(frozen=True)
class Row:
    """One contestant in one section. `at_most` bounds the ratio to `peer` or, without a peer, the value."""

    section: str
    who: str
    unit: str
    samples: tuple[float, ...]
    peer: str | None = None
    ratio: float | None = None
    at_most: float | None = None

    @property
    def value(self) -> float:
        return median(self.samples)

    @property
    def passed(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.at_most is None:
            return None
        return (self.value if self.ratio is None else self.ratio) <= self.at_most


def rows(section: str, unit: str, samples: Samples, base: str, targets: Mapping[str, Target]) -> list[Row]:
    """A row for each contestant: held to its target if it has one, else merely compared with `base`.

    A target whose peer was not measured falls away, as does the comparison.
    """
    measured = []
    for who, seconds in samples.items():
        target = targets.get(who)
        peer = target.peer if target else base
        if peer is not None and peer not in samples:
            target = peer = None
        if peer == who:
            peer = None
        measured.append(
            Row(
                section,
                who,
                unit,
                samples=tuple(s * SCALE[unit] for s in seconds),
                peer=peer,
                ratio=ratio(samples, who, peer) if peer else None,
                at_most=target.at_most if target else None,
            )
        )
    return measured


def table(measured: Sequence[Row], title: str) -> Table:
    """The rows for a terminal, a rule between sections."""
    shown = Table("what", "who", title=title, title_justify="left")
    for header in ("CPU time", "ratio", "target"):
        shown.add_column(header, justify="right")
    shown.add_column("")
    for i, row in enumerate(measured):
        first = i == 0 or measured[i - 1].section != row.section
        if first and i:
            shown.add_section()
        times = "" if row.ratio is None else f"{row.ratio:.2f} x {row.peer}"
        limit = f"<= {row.at_most:g}" + (" x" if row.peer else f" {row.unit}") if row.at_most is not None else ""
        mark = {True: "[green]pass", False: "[red]fail", None: ""}[row.passed]
        # Escaped: rich would take a name such as tessera[aten] for markup and drop its brackets.
        name, value = escape(row.who), f"{row.value:.2f} {row.unit}"
        shown.add_row(row.section if first else "", name, value, escape(times), limit, mark)
    return shown


def listed(measured: Sequence[Row]) -> list[dict[str, object]]:
    """The rows for programs: every field with the median and the verdict."""
    return [asdict(row) | {"value": row.value, "passed": row.passed} for row in measured]


def to_json(suite: str, machine: Machine, rows: list[dict[str, object]]) -> dict[str, object]:
    """The whole run: the machine and every row."""
    return {"suite": suite, "machine": asdict(machine), "rows": rows}
