"""A step as trace events, the JSON that Perfetto and chrome://tracing open: one track for each of its spans' tracks."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.tools.profile.measured import Row, Span

PROCESS = 1


def trace_events(rows: Sequence[Row], spans: Sequence[Span]) -> dict[str, object]:
    """Complete events ("X") in microseconds, each equation with its roofline and the user's line."""
    tracks = {track: number for number, track in enumerate(dict.fromkeys(span.track for span in spans), 1)}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "args": {"name": "tessera"}}
    ]
    for track, number in tracks.items():
        events.append({"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": number, "args": {"name": track}})
        events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": number, "args": {"sort_index": number}}
        )
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.track,
                "pid": PROCESS,
                "tid": tracks[span.track],
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "args": {} if span.row is None else _details(rows[span.row]),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _details(row: Row) -> dict[str, object]:
    return {
        "graph": row.graph,
        "program": row.program,
        "results": ", ".join(row.results),
        "executor": row.executor,
        "where": ", ".join(f"{file}:{line}" for file, line in row.lines),
        "module": row.module,
        "bytes": row.bytes,
        "flops": row.flops,
        "limit": row.limit,
        "reached": row.reached,
    }
