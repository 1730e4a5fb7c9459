"""What `tessera bench kernels` hands back: one `Measured` a case, size and direction, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean

from rich.markup import escape
from rich.table import Table

from tessera.util.units import duration, percent, times

OURS = "tessera[tile]"
# What is promised of a CPU, against TorchInductor: every steady time, their geometric mean, every first call.
MOST, MOST_MEAN, MOST_FIRST = 1.0, 0.9, 1 / 3


@dataclass
class Measured:
    """Seconds by contestant, steady and of the first call; why there are none, where there are none."""

    case: str
    direction: str  # forward, backward, or both
    size: str
    dtype: str
    device: str
    threads: int = 1
    seconds: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)  # ours to each peer, round by round where interleaved
    first: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    copy: float = 0.0  # bytes a second of a copy, in this run
    flops: float = 0.0
    matmul: float = 0.0  # flops a second of a plain matrix product, in this run

    def ratio(self, peer: str) -> float | None:
        """How many times the peer's time ours is."""
        if peer in self.ratios:
            return self.ratios[peer]
        ours, theirs = self.seconds.get(OURS), self.seconds.get(peer)
        return ours / theirs if ours and theirs else None

    def first_ratio(self, peer: str) -> float | None:
        ours, theirs = self.first.get(OURS), self.first.get(peer)
        return ours / theirs if ours and theirs else None

    def fraction(self, who: str = OURS) -> float | None:
        """How near a contestant comes to the copy, or to the plain matrix product."""
        seconds = self.seconds.get(who)
        if not seconds:
            return None
        if self.flops and self.matmul:
            return self.flops / self.matmul / seconds
        return self.bytes / self.copy / seconds if self.copy else None


def table(measured: Sequence[Measured], title: str) -> Table:
    """For a terminal: our time, then how it compares; below, what failed."""
    cuda = any(row.device == "cuda" for row in measured)
    shown = Table("what", "direction", "size", title=title, title_justify="left", caption_justify="left")
    headers = ["dtype" if cuda else "threads", "eager", "inductor", "tessera", "/eager", "/inductor"]
    headers += ["of roofline", "eager's", "inductor's"] if cuda else []
    for header in (*headers, "first call", "/inductor"):
        shown.add_column(header, justify="right")
    before = ""
    for row in measured:
        if before and row.case != before:
            shown.add_section()
        seconds = [duration(row.seconds.get(who)) for who in ("eager", "inductor", OURS)]
        ratios = [times(row.ratio(peer)) for peer in ("eager", "inductor")]
        share = [percent(row.fraction(who)) for who in (OURS, "eager", "inductor")] if cuda else []
        first = [duration(row.first.get(OURS)), times(row.first_ratio("inductor"))]
        start = [
            row.case if row.case != before else "",
            row.direction,
            row.size,
            row.dtype if cuda else str(row.threads),
        ]
        shown.add_row(*start, *seconds, *ratios, *share, *first)
        before = row.case
    caption = [] if cuda else [*summary(measured), *(f"[red]{escape(line)}" for line in missed_targets(measured))]
    caption += [
        f"[red]{row.case} {row.direction} {row.size} {row.dtype}, {escape(who)}: {escape(error)}"
        for row in measured
        for who, error in row.errors.items()
    ]
    shown.caption = "\n".join(caption)
    return shown


def summary(measured: Sequence[Measured]) -> list[str]:
    """All rows in a line each: steady time and first call against TorchInductor, as geometric means, and the worst."""
    lines = []
    for what, ratios in (("steady", _ratios(measured, Measured.ratio)), ("first call", _firsts(measured))):
        if ratios:
            worst = max(ratios, key=lambda name: ratios[name])
            mean = geometric_mean(ratios.values())
            lines.append(f"{what} to inductor: {mean:.2f} in the geometric mean, {ratios[worst]:.2f} at most ({worst})")
    return lines


def missed_targets(measured: Sequence[Measured]) -> list[str]:
    """What a run on a CPU shows to be slower than promised, a line each."""
    steady = _ratios(measured, Measured.ratio)
    lines = [f"slower than inductor: {name}, {r:.3f}" for name, r in steady.items() if r > MOST]
    if steady and (mean := geometric_mean(steady.values())) > MOST_MEAN:
        lines.append(f"the geometric mean is {mean:.3f}, more than {MOST_MEAN}")
    late = {name: r for name, r in _firsts(measured).items() if r > MOST_FIRST}
    return lines + [
        f"the first call takes more than a third of inductor's: {name}, {r:.2f}" for name, r in late.items()
    ]


def _firsts(measured: Sequence[Measured]) -> dict[str, float]:
    return _ratios(measured, Measured.first_ratio)


def _ratios(measured: Sequence[Measured], of: Callable[[Measured, str], float | None]) -> dict[str, float]:
    return {f"{row.case} {row.direction}, threads {row.threads}": r for row in measured if (r := of(row, "inductor"))}


def listed(measured: Sequence[Measured]) -> list[dict[str, object]]:
    """For programs: every field, and what follows from them."""
    return [
        asdict(row)
        | {
            "to_eager": row.ratio("eager"),
            "to_inductor": row.ratio("inductor"),
            "first_to_inductor": row.first_ratio("inductor"),
            "of_roofline": {who: row.fraction(who) for who in row.seconds},
        }
        for row in measured
    ]
