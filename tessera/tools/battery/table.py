"""The outcomes of a battery as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from tessera.tools.battery.case import BAD, STATUSES, Outcome


def counted(outcomes: Sequence[Outcome]) -> dict[str, Counter]:
    """Section -> how many outcomes of each status."""
    counts: dict[str, Counter] = {}
    for outcome in outcomes:
        counts.setdefault(outcome.section, Counter())[outcome.status] += 1
    return counts


def bad(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """What is not right, the wrong results first."""
    failures = [o for o in outcomes if o.status in BAD]
    return sorted(failures, key=lambda o: (BAD.index(o.status), o.section, o.case, o.part))


def table(outcomes: Sequence[Outcome]) -> Table:
    """Section × status, and the seconds that workers spent on it."""
    shown = Table("section", *STATUSES, "seconds of workers")
    total: Counter = Counter()
    for section, counts in sorted(counted(outcomes).items()):
        seconds = sum(o.seconds for o in outcomes if o.section == section)
        shown.add_row(section, *(_cell(status, counts[status]) for status in STATUSES), f"{seconds:.0f}")
        total.update(counts)
    shown.add_section()
    seconds = sum(o.seconds for o in outcomes)
    shown.add_row("all", *(_cell(status, total[status]) for status in STATUSES), f"{seconds:.0f}")
    return shown


def _cell(status: str, count: int) -> str:
    return f"[red]{count}" if count and status in BAD else str(count)


def line(outcome: Outcome) -> str:
    """`wrong operators/softmax bfloat16/backward strided: …`"""
    name = "/".join(filter(None, (outcome.section, outcome.case, outcome.part)))
    return f"{outcome.status} {name}: {outcome.why}" if outcome.why else f"{outcome.status} {name}"


def facts(outcomes: Sequence[Outcome], notes: Sequence[str], device: str, machine: str, wall: float) -> dict:
    """What goes into the JSON file. On a GPU a section that cannot run leaves the question open: that is not well."""
    return {
        "ok": not bad(outcomes) and not (notes and device == "cuda"),
        "device": device,
        "machine": machine,
        "seconds": round(wall, 1),
        "sections": {section: dict(counts) for section, counts in counted(outcomes).items()},
        "notes": list(notes),
        "outcomes": [dataclasses.asdict(o) for o in outcomes],
    }
