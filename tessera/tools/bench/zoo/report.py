"""What the zoo's measurements say: ratios to TorchInductor, geometric means, the bars, and one table.

A ratio is Tessera's figure over the best that any way of TorchInductor reached in it. It exists where both are right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, log

from rich.markup import escape
from rich.table import Table

from tessera.tools.bench.model_contestants import EAGER, INDUCTOR, OURS
from tessera.tools.bench.model_report import GIB
from tessera.tools.bench.zoo.registry import Entry
from tessera.tools.bench.zoo.results import OK, Cell
from tessera.util.units import duration, percent, times

FIGURES = ("seconds", "peak", "first", "host")


@dataclass(frozen=True)
class Bar:
    """What Tessera may take, as a ratio to TorchInductor: for each model, and in the geometric mean."""

    figure: str
    said: str
    each: float
    mean: float | None = None
    held: float | None = None  # in the mean of those held back


BARS = (
    Bar("seconds", "time", 1.0, 0.88, 0.88),
    Bar("peak", "memory", 1.0, 0.75),
    Bar("first", "first call", 0.5, 0.35),
    Bar("host", "host time", 0.8),
)


@dataclass
class Row:
    """A job with everyone's cells."""

    job: str
    size: str
    held: bool
    cells: dict[str, Cell] = field(default_factory=dict)

    def figure(self, who: str, figure: str) -> float | None:
        cell = self.cells.get(who)
        return getattr(cell, figure) if cell is not None and cell.status == OK else None

    def best(self, figure: str) -> float | None:
        """The best that any way of TorchInductor reached."""
        figures = [self.figure(who, figure) for who in self.cells if who.partition("[")[0] == INDUCTOR]
        return min((x for x in figures if x is not None), default=None)

    def ratio(self, figure: str) -> float | None:
        ours, theirs = self.figure(OURS, figure), self.best(figure)
        return ours / theirs if ours is not None and theirs else None

    @property
    def of_floor(self) -> float | None:
        floor, ours = self.figure(EAGER, "floor"), self.figure(OURS, "seconds")
        return floor / ours if floor and ours else None


def rows(chosen: Sequence[Entry], cells: Iterable[Cell]) -> list[Row]:
    by_job = {entry.name: Row(entry.name, entry.job.size, entry.held) for entry in chosen}
    for cell in cells:
        if cell.job in by_job:
            by_job[cell.job].cells[cell.who] = cell
    return [row for row in by_job.values() if row.cells]


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return exp(sum(map(log, known)) / len(known)) if known else None


def mean(measured: Sequence[Row], figure: str, held: bool = False) -> float | None:
    return geometric_mean(row.ratio(figure) for row in measured if row.held or not held)


def missed(measured: Sequence[Row], bars: Sequence[Bar] = BARS) -> list[str]:
    """Every model that Tessera does not get right, and every bar that is missed, in words."""
    ours = [cell for row in measured if (cell := row.cells.get(OURS)) is not None]
    told = [f"{cell.job}: {cell.status}, {cell.why}" for cell in ours if cell.status != OK]
    for bar in bars:
        for row in measured:
            if (ratio := row.ratio(bar.figure)) is not None and ratio > bar.each:
                told.append(f"{row.job}: {bar.said} {ratio:.2f} of TorchInductor's, at most {bar.each:g}")
        for limit, held, which in ((bar.mean, False, "all"), (bar.held, True, "those held back")):
            value = mean(measured, bar.figure, held)
            if limit is not None and value is not None and value > limit:
                told.append(f"{bar.said} in the mean of {which} {value:.2f}, at most {limit:g}")
    return told


def summary(measured: Sequence[Row], told: Sequence[str]) -> dict[str, object]:
    """For programs: the ratios of every job, and their means."""
    return {
        "ratios": {row.job: {figure: row.ratio(figure) for figure in FIGURES} for row in measured},
        "means": {figure: mean(measured, figure) for figure in FIGURES},
        "held_back_means": {figure: mean(measured, figure, held=True) for figure in FIGURES},
        "missed": list(told),
    }


def table(measured: Sequence[Row]) -> Table:
    """Times, memory, first calls and errors, a row a job; the means; below, what failed."""
    shown = Table("model", "size", title="tessera bench zoo", title_justify="left", caption_justify="left")
    headers = (
        "eager", "inductor", "tessera", "ratio", "of floor", "GiB", "ratio", "first", "ratio", "host", "ratio",
        "loss off", "gradients off", "eager's",
    )  # fmt: skip
    for header in headers:
        shown.add_column(header, justify="right")
    for row in measured:
        shown.add_row(f"{row.job} *" if row.held else row.job, row.size, *_cells(row))
    shown.add_section()
    for title, held in (("geometric mean", False), ("of those held back *", True)):
        time, memory, first, host = (times(mean(measured, figure, held)) for figure in FIGURES)
        shown.add_row(title, "", "", "", "", time, "", "", memory, "", first, "", host, "", "", "")
    shown.caption = "\n".join(_failures(measured))
    return shown


def _cells(row: Row) -> list[str]:
    memory = row.figure(OURS, "peak")
    ours = row.cells.get(OURS)
    return [
        _time(row, EAGER), _time(row, INDUCTOR), _time(row, OURS), times(row.ratio("seconds")), percent(row.of_floor),
        "" if memory is None else f"{memory / GIB:.2f}", times(row.ratio("peak")),
        duration(row.figure(OURS, "first")), times(row.ratio("first")),
        duration(row.figure(OURS, "host")), times(row.ratio("host")),
        *(_error(x) for x in ((ours.error, ours.gradient_error, ours.eager_gradient_error) if ours else (None,) * 3)),
    ]  # fmt: skip


def _time(row: Row, who: str) -> str:
    """Milliseconds; TorchInductor's are of its fastest way. What is not right says so in their place."""
    seconds = row.best("seconds") if who == INDUCTOR else row.figure(who, "seconds")
    if seconds is not None:
        return f"{seconds * 1e3:.3g} ms"
    cell = row.cells.get(who)
    return "" if cell is None else f"[red]{cell.status}"


def _error(distance: float | None) -> str:
    return "" if distance is None else f"{distance:.1e}"


def _failures(measured: Sequence[Row]) -> list[str]:
    return [
        f"[red]{row.job}, {escape(who)}: {cell.status}, {escape(cell.why)}"
        for row in measured
        for who, cell in row.cells.items()
        if cell.status != OK
    ]
