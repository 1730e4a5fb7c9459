"""What `tessera bench models` hands back: one `Row` a job, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.markup import escape
from rich.table import Table

from tessera.tools.bench.measure import Samples
from tessera.tools.bench.model_contestants import EAGER, INDUCTOR, OURS
from tessera.util.units import duration, percent, times

GIB = 2**30


@dataclass
class Row:
    """By contestant: seconds, bytes at the peak, seconds of the first call; or why there are none.

    A rival is Tessera on another model than the row's: it has a floor of its own.
    """

    job: str
    size: str
    kind: str
    dtype: str
    device: str
    seconds: dict[str, float] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)  # ours to each peer, round by round
    peak: dict[str, int] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)  # in this process
    cold: dict[str, float] = field(default_factory=dict)  # in a process of its own, with empty caches
    warm: dict[str, float] = field(default_factory=dict)  # the same with the caches that the cold one left
    errors: dict[str, str] = field(default_factory=dict)
    floor: float = 0.0  # seconds
    rivals: dict[str, float] = field(default_factory=dict)  # their floors
    wall: float = 0.0  # seconds that measuring all of it took

    def best(self, peer: str) -> str | None:
        """The fastest of a peer's ways, such as inductor and inductor[autotune]."""
        ways = {who: s for who, s in self.seconds.items() if who == peer or who.startswith(f"{peer}[")}
        return min(ways, key=ways.__getitem__, default=None)

    def ratio(self, peer: str) -> float | None:
        """How many times the time of the peer's best way ours is."""
        return self.ratios.get(self.best(peer) or "")

    def fraction(self, who: str = OURS) -> float | None:
        """How near a contestant comes to the floor."""
        seconds = self.seconds.get(who)
        floor = self.rivals.get(who, self.floor)
        return floor / seconds if seconds and floor else None

    def line(self) -> str:
        """The row in a line, for those who wait."""
        parts = [f"{who} {duration(s)}" for who, s in self.seconds.items()]
        parts += [f"{who}: {error}" for who, error in self.errors.items()]
        return f"{self.job} {self.size}: {'; '.join(parts)} ({self.wall:.0f} s)"


def peers(rows: Sequence[Row]) -> list[str]:
    """Everyone but Tessera and its rivals, in the usual order, without the further ways of Inductor."""
    seen = {who.partition("[")[0] for row in rows for who in row.first if who not in row.rivals} - {OURS}
    return sorted(seen, key=lambda who: ({EAGER: 0, INDUCTOR: 1}.get(who, 2), who))


def table(rows: Sequence[Row]) -> Table:
    """For a terminal: times, ratios, peaks, first calls, floors; below, what failed."""
    others = peers(rows)
    shown = Table("what", "size", title="tessera bench models", title_justify="left", caption_justify="left")
    everyone = [*others, OURS]
    apart, peak = any(row.cold for row in rows), any(row.peak for row in rows)
    headers = [*everyone, *(f"/{who}" for who in others), "of floor", *(f"{who}'s" for who in others)]
    headers += ["peak GiB", *(f"{who}'s" for who in others)] if peak else []
    headers += [f"first {who}" for who in everyone if who != EAGER]
    headers += [f"{when} {who}" for when in ("cold", "warm") for who in everyone if who != EAGER] if apart else []
    for header in headers:
        shown.add_column(header, justify="right")
    for i, row in enumerate(rows):
        name = row.job if not i or rows[i - 1].job != row.job else ""
        shown.add_row(name, row.size, *_cells(row, others, apart, peak))
    shown.caption = "\n".join(line for row in rows for line in _below(row))
    return shown


def _below(row: Row) -> list[str]:
    rivals = [
        f"{row.job} {row.size} takes {row.ratios[who]:.2f} of {who}'s {duration(row.seconds[who])} "
        f"({percent(row.fraction(who))} of its own floor)"
        for who in row.rivals
        if who in row.ratios
    ]
    return rivals + [f"[red]{row.job} {row.size}, {escape(who)}: {escape(text)}" for who, text in row.errors.items()]


def _cells(row: Row, others: list[str], apart: bool, peak: bool) -> list[str]:
    best = [row.best(who) or who for who in others] + [OURS]
    compiled = [who for who in best if who != EAGER]
    cells = [duration(row.seconds.get(who)) for who in best]
    cells += [times(row.ratio(who)) for who in others]
    cells += [percent(row.fraction(who)) for who in (OURS, *best[:-1])]
    if peak:
        cells += ["" if who not in row.peak else f"{row.peak[who] / GIB:.2f}" for who in (OURS, *best[:-1])]
    cells += [duration(row.first.get(who)) for who in compiled]
    for measured in (row.cold, row.warm) if apart else ():
        cells += [duration(measured.get(who)) for who in compiled]
    return cells


def listed(rows: Sequence[Row]) -> list[dict[str, object]]:
    """For programs: every field, and what follows from them."""
    return [
        asdict(row)
        | {
            "best": {who: row.best(who) for who in peers([row])},
            "to": {who: row.ratio(who) for who in (*peers([row]), *row.rivals)},
            "of_floor": {who: row.fraction(who) for who in row.seconds},
        }
        for row in rows
    ]
