"""A program for a spatial machine as one HTML file that needs nothing else, and as a trace for Perfetto beside it.

In: a program of `map_onto`. Out: the page. Its data is the listing itself, the tiles, the captured program, and what
was watched; the page's script reads the listing line by line. The data is compressed, since cores' pages repeat
themselves. It is never executed: the script only sets text, and the page's policy allows no other script, no request.
"""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

from tessera.spatial.listing import parse, print_listing
from tessera.spatial.program import SpatialProgram
from tessera.spatial.simulator.judge import Judged, judge
from tessera.spatial.simulator.timeline import events
from tessera.spatial.watch.metrics import metrics
from tessera.spatial.watch.waits import Waits
from tessera.tools.report.write import assembled
from tessera.util.files import check_writable

# In the order in which they build on each other.
SCRIPTS = ("parts", "program", "gantt", "mesh", "memory", "columns", "facts", "start")


def write(program: SpatialProgram, path: str | Path) -> None:
    """Write FILE.html, and FILE.perfetto.json beside it."""
    check_writable(path)
    judged = _judged(program)
    Path(path).write_text(page(program, judged), encoding="utf-8")
    beside = Path(path).with_suffix(".perfetto.json")
    beside.write_text(json.dumps({"traceEvents": list(events(judged))}, separators=(",", ":")), encoding="utf-8")


def page(program: SpatialProgram, judged: Judged | None = None) -> str:
    """The whole file."""
    packed = _packed(data(program, judged or _judged(program)))
    return assembled("tessera.tools.spatial_report", "page", SCRIPTS, "async ()", program.machine.name, packed)


def data(program: SpatialProgram, judged: Judged) -> dict[str, object]:
    machine = program.machine
    path = Waits(judged).critical_path()
    seen = metrics(program, judged)
    return {
        "title": machine.name,
        "summary": program.summary(),
        "clock": machine.chip.clock,
        "grid": machine.chip.grid,
        "sram": machine.sram.size,
        "cycles": program.cycles,
        "bound": program.bound,
        "limit": program.limit,
        "reasons": program.reasons,
        "gap": seen.gap,
        "links": {name: round(share, 4) for (kind, _, name), share in seen.busy.items() if kind == "link"},
        "critical": [[work.step.of.line, kind] for work, kind in path],
        "sources": [[name, str(machine.value(name)), source] for name, source in machine.sources.items()],
        "stages": {name: text.splitlines() for name, text in (program.stages | {"listing": _listing(program)}).items()},
    }


def _listing(program: SpatialProgram) -> str:
    """Every instruction of every core has a line of its own."""
    return print_listing(program.listing, share=False)


def _judged(program: SpatialProgram) -> Judged:
    """Of the listing as the page shows it: its instructions know their lines."""
    return judge(parse(_listing(program)), program.machine)


def _packed(values: dict[str, object]) -> str:
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
