"""Everything a report shows, as one plain dictionary.

In: jitted functions, and a profile of them where there is one. Out: tables that refer to each other by number, so that
a model of many equal layers stays small: lines, kernels, places in the user's source, files, graphs, the profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tessera
from tessera.inspection.explain import explain_states
from tessera.inspection.mesh import picture
from tessera.inspection.reports import GraphReport
from tessera.ir.equation import short_path
from tessera.just_in_time.compiled import Compiled
from tessera.pipeline.compilation import Compilation
from tessera.tools.machine import machine
from tessera.tools.profile import Profile
from tessera.tools.profile.instrument import labelled
from tessera.tools.report.kernels import Kernels
from tessera.tools.report.lines import Lines
from tessera.util.errors import InputError

# What is told of a graph in words.
REPORTED = (
    "name", "operators", "seconds", "location", "called_at", "break_reason", "break_line", "break_advice",
    "recompile_reason", "recompile_change", "recompile_advice", "eager_reason",
)  # fmt: skip
LARGEST_FILE = 2_000_000  # characters; a longer source is not shown


def collect(states: Sequence[Compiled], profile: Profile | None, title: str) -> dict[str, object]:
    """The report's data, ready for JSON."""
    compilations = [c for state in states for c in state.compilations()]
    if not compilations:
        raise InputError("nothing is compiled yet; call the function first, or pass args=(…)")
    kernels = Kernels()
    lines = Lines(kernels)
    labels = iter(labelled(compilations))  # graphs that run eagerly have no compilation, and no stages
    explanation = explain_states(states, measure=profile is not None)
    graphs = [_graph(g, *next(labels), lines) if g.equations else _eager(g) for g in explanation.graphs]
    files = sorted({source.file for source in lines.sources})
    return {
        "version": tessera.__version__,
        "title": title,
        "machine": str(machine()),
        "files": [{"path": path, "name": short_path(path), "lines": _read(path)} for path in files],
        "places": [[files.index(s.file), s.line, s.module, s.note] for s in lines.sources],
        "lines": {
            name: getattr(lines, name) for name in ("text", "types", "places", "kernel", "body", "tags")
        },
        "kernels": kernels.entries,
        "graphs": graphs,
        "profile": None if profile is None else _profile(profile, graphs),
    }  # fmt: skip


def _eager(report: GraphReport) -> dict[str, object]:
    empty = {"stages": [], "programs": [], "claims": [], "unfused": [], "saved": [], "saved_bytes": 0, "mesh": None}
    return {name: getattr(report, name) for name in REPORTED} | empty


def _graph(report: GraphReport, compilation: Compilation, label: str, lines: Lines) -> dict[str, object]:
    """One graph: what is told about it, its stages as line numbers, its programs with their memory."""
    stages, numbers = [], {}
    for name, trace in compilation.account.stages:
        numbers[id(trace)] = len(stages)
        stages.append({"name": name, "equations": len(trace.equations), "lines": lines.stage(trace)})
    programs = [
        {
            "name": program.name,
            "stage": numbers[id(program.trace)],
            "equations": lines.equations(program.trace),
            "live": memory.predicted.during,
            "measured": memory.measured.during if memory.measured is not None else None,
            "base": compilation.account.saved_bytes if program.name == "backward" else 0,
        }
        for program, memory in zip(compilation.account.programs, report.memory, strict=True)
    ]
    return _eager(report) | {
        "name": label,
        "stages": stages,
        "programs": programs,
        "claims": [[c.executor, len(c.operators), sorted(set(c.operators)), c.why] for c in compilation.account.claims],
        "unfused": [[why.reason, why.results, why.lines] for why in report.unfused],
        "saved": list(compilation.account.saved),
        "saved_bytes": compilation.account.saved_bytes,
        "mesh": picture(compilation.account),
    }


def _profile(profile: Profile, graphs: list[dict]) -> dict[str, object]:
    """Rows and spans as short lists; a row names its equation by graph, program and position."""
    places = {
        (g["name"], p["name"]): (i, j) for i, g in enumerate(graphs) for j, p in enumerate(g["programs"])
    }  # fmt: skip
    tracks = list(dict.fromkeys(span.track for span in profile.spans))
    names = list(dict.fromkeys(span.name for span in profile.spans))
    number = {name: i for i, name in enumerate(names)}
    sums = ("steps", "step_seconds", "measured_seconds", "equation_seconds", "between_seconds", "device_seconds")
    return {name: getattr(profile, name) for name in (*sums, "outside_seconds", "idle_seconds", "gaps")} | {
        "rates": vars(profile.rates),
        "columns": ["graph", "program", "index", "executor", "operator", "seconds", "host", "bytes", "flops",
                    "best", "limit", "calls", "kernels"],
        "rows": [
            [*places[r.graph, r.program], r.index, r.executor, r.operator, r.seconds, r.host_seconds, r.bytes,
             r.flops, r.roofline_seconds, r.limit, r.calls, r.kernels]
            for r in profile.rows
        ],
        "tracks": tracks,
        "names": names,
        "spans": [[number[s.name], tracks.index(s.track), s.start, s.seconds, s.row] for s in profile.spans],
    }  # fmt: skip


def _read(path: str) -> list[str]:
    """The lines of a source file; none where it cannot be read."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return []
    return text.splitlines() if len(text) <= LARGEST_FILE else []
