"""`tessera bench serve`: how fast requests are answered."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict

from rich.table import Table

from tessera.tools.bench.report import Outcome
from tessera.tools.bench.serve_offline import JOBS, Measured, Place, measure
from tessera.tools.command import chosen_device

SECTIONS = JOBS


def outcome(args: Namespace, say: Callable[[str], None]) -> Outcome:
    device = chosen_device(args)
    rows = list(measure(args.only, Place(device, args.tiny, say)))
    note = f"random weights in bfloat16 on {device}, one run each" + (", tiny" if args.tiny else "")
    return Outcome(note, table(rows), [asdict(row) for row in rows], any(row.passed is False for row in rows))


def table(rows: list[Measured]) -> Table:
    shown = Table("job", "what", "measured", "asked", "limit", "of limit", "")
    for row in rows:
        asked = "" if row.bound is None else f"{'≥' if row.at_least else '≤'} {row.bound:,.4g}"
        share = "" if row.limit is None else f"{(row.value / row.limit if row.at_least else row.limit / row.value):.2f}"
        limit = "" if row.limit is None else f"{row.limit:,.4g}"
        mark = {None: "", True: "met", False: "missed"}[row.passed]
        value = f"{row.value:,.4g} {row.unit}"
        shown.add_row(row.job, row.what, value, asked, limit, share, " ".join(filter(None, (mark, row.note))))
    return shown
