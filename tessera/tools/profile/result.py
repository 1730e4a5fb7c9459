"""A profile: its rows (one an equation of a final program), the spans of one step, and the sums.

All times are seconds, medians over the measured steps; a step is the sum of its parts. On a GPU a row's time is
that of its kernels; on the CPU it is that of its call. `table` is for people, `to_dict` and `save_chrome` for programs.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from tessera.inspection.floor import Floor
from tessera.tools.profile.chrome import trace_events
from tessera.tools.profile.losses import floor_of
from tessera.tools.profile.measured import Row, Span
from tessera.util.errors import OptionError
from tessera.util.html import as_html
from tessera.util.units import counted, percent

GROUPS = ("equation", "operator", "line", "module")


@dataclass(frozen=True)
class Rates:
    """What the roofline is made of, as measured on this device."""

    device: str
    bandwidth: float  # bytes a second
    flops: float
    matrix_flops: float


@dataclass(frozen=True, repr=False)
class Profile:
    """Where the time of a step goes; `print` it."""

    rows: tuple[Row, ...]  # longest first
    spans: tuple[Span, ...]  # of one step
    steps: int
    step_seconds: float  # of a step with nothing measured inside
    measured_seconds: float  # of a step with every equation measured: its equations and what lies between
    device_seconds: float  # kernels of the programs and outside of them; 0 on a CPU
    outside_seconds: float  # kernels that belong to no equation
    idle_seconds: float  # the GPU had nothing to do between a step's first kernel and its last
    gaps: tuple[tuple[float, float], ...]  # (start, seconds) of idle stretches in the step that is shown, longest first
    rates: Rates

    @property
    def equation_seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def host_seconds(self) -> float:
        """Time of the host inside equations."""
        return sum(row.host_seconds for row in self.rows)

    @property
    def between_seconds(self) -> float:
        """Time of the host outside equations: Python, dispatch, autograd, the caller."""
        return max(self.measured_seconds - self.host_seconds, 0.0)

    @property
    def floor(self) -> Floor:
        """The least time of a step by the roofline, and what is lost above it, by the user's line."""
        return floor_of(self.rows, self.step_seconds, self.rates.device)

    def table(self, limit: int | None = 30, by: str = "equation") -> Table:
        """The longest rows: every equation, or summed by operator, by the user's line, or by module."""
        shown = grouped(self.rows, by)
        title = f"{self.step_seconds * 1e3:.3f} ms a step on {self.rates.device}; by {by}"
        table = Table(title=title, title_justify="left", caption=self._summary(), caption_justify="left")
        for name in ("time", "share", "roofline", "limit", "bytes", "flops"):
            table.add_column(name, justify="right", no_wrap=True)
        for name in ("what", "where", "module"):
            table.add_column(name, overflow="fold")
        total = sum(g.seconds for g in shown) or 1.0
        for g in shown[:limit]:
            table.add_row(
                f"{g.seconds * 1e6:.1f} µs", f"{g.seconds / total:.1%}", percent(g.reached), g.limit,
                _scaled(g.bytes, "B"), _scaled(g.flops, ""), g.what, g.where, g.module,
            )  # fmt: skip
        if limit is not None and len(shown) > limit:
            rest = sum(g.seconds for g in shown[limit:])
            table.add_row(f"{rest * 1e6:.1f} µs", f"{rest / total:.1%}", "", "", "", "", f"{len(shown) - limit} more")
        return table

    def _summary(self) -> str:
        parts = [f"measured {self.measured_seconds * 1e3:.3f} ms", f"equations {self.equation_seconds * 1e3:.3f} ms"]
        parts.append(f"host between equations {self.between_seconds * 1e3:.3f} ms")
        if self.device_seconds:
            parts.append(f"GPU busy {self.device_seconds * 1e3:.3f} ms, idle {self.idle_seconds * 1e3:.3f} ms")
            parts.append(f"outside the programs {self.outside_seconds * 1e3:.3f} ms")
        return "; ".join(parts)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=160)
        console.print(self.table())
        return console.file.getvalue()  # type: ignore[attr-defined]

    __repr__ = __str__  # what a prompt shows

    def _repr_html_(self) -> str:
        return as_html(self.table())

    def to_dict(self) -> dict[str, object]:
        """Everything, in plain lists, dictionaries and numbers."""
        sums = {"equation_seconds": self.equation_seconds, "between_seconds": self.between_seconds}
        return json.loads(json.dumps(asdict(self) | sums))

    def save_chrome(self, path: str) -> None:
        """Write the step as trace events: open the file in Perfetto or chrome://tracing."""
        with open(path, "w") as file:
            json.dump(trace_events(self.rows, self.spans), file)


@dataclass(frozen=True)
class Group:
    """Rows that are shown as one."""

    what: str
    where: str
    module: str
    seconds: float
    bytes: float
    flops: float
    roofline_seconds: float
    limit: str

    @property
    def reached(self) -> float | None:
        return self.roofline_seconds / self.seconds if self.seconds and self.roofline_seconds else None


def grouped(rows: tuple[Row, ...], by: str) -> list[Group]:
    """Rows summed by what they have in common, longest first."""
    if by not in GROUPS:
        raise OptionError(f"expected by to be one of {', '.join(GROUPS)}, got {by!r}")
    together: dict[object, list[Row]] = {}
    for number, row in enumerate(rows):
        keys = {"equation": number, "operator": (row.executor, row.operator), "line": row.where, "module": row.module}
        together.setdefault(keys[by], []).append(row)
    groups = [_group(members, by) for members in together.values()]
    return sorted(groups, key=lambda g: -g.seconds)


def _group(rows: list[Row], by: str) -> Group:
    def common(texts: list[str]) -> str:
        return texts[0] if len(set(texts)) == 1 else ""

    longest: dict[str, float] = {}
    for row in rows:
        longest[row.limit] = longest.get(row.limit, 0.0) + row.roofline_seconds
    what = rows[0].operator if by in ("equation", "operator") else counted(len(rows), "equation")
    executor = common([row.executor for row in rows])
    return Group(
        f"{executor}: {what}" if executor and executor != "aten" and by in ("equation", "operator") else what,
        common([row.where for row in rows]),
        common([row.module for row in rows]),
        sum(row.seconds for row in rows),
        sum(row.bytes for row in rows),
        sum(row.flops for row in rows),
        sum(row.roofline_seconds for row in rows),
        max(longest, key=lambda limit: longest[limit]),
    )


def _scaled(number: float, unit: str) -> str:
    """1234567 -> 1.23 M; nothing for 0."""
    if not number:
        return ""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {prefix}{unit}"
    return f"{number:.0f} {unit}".strip()
