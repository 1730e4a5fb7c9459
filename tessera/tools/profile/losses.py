"""From a profile's rows to the time above the floor: what each kind of equation loses, and what limits it.

In: rows, and the time of a step. Out: a `Floor`. Rows of one program with the same operators, lines and work are alike,
as the layers of a model are, and are one loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.inspection.floor import Floor, Loss
from tessera.ir.equation import short_path
from tessera.tools.profile.measured import Row
from tessera.util.units import duration, percent

SPEEDS = {"memory": "the memory's speed", "compute": "the arithmetic's speed"}


def floor_of(rows: Sequence[Row], step_seconds: float, device: str) -> Floor:
    alike: dict[tuple, list[Row]] = {}
    programs: dict[str, float] = {}
    for row in sorted(rows, key=lambda r: r.program == "backward"):  # programs in the order they run in
        key = (row.program, row.executor, row.operator, row.lines, row.calls, row.bytes, row.flops, row.limit)
        alike.setdefault(key, []).append(row)
        programs[row.program] = programs.get(row.program, 0.0) + row.roofline_seconds
    losses = sorted(map(_loss, alike.values()), key=lambda loss: -loss.seconds)
    return Floor(device, programs, step_seconds, step_seconds - sum(r.seconds for r in rows), tuple(losses))


def _loss(rows: list[Row]) -> Loss:
    row = rows[0]
    seconds, best = sum(r.seconds for r in rows), sum(r.roofline_seconds for r in rows)
    operators = tuple(row.operator.split(" + "))
    return Loss(seconds - best, len(rows), operators, _where(row), row.program, _why(rows, best, seconds))


def _where(row: Row) -> str:
    return f"{short_path(row.lines[0][0])}:{row.lines[0][1]}" if row.lines else row.module


def _why(rows: list[Row], best: float, seconds: float) -> str:
    row, count = rows[0], len(rows)
    parts = ["a library call" if row.executor == "aten" else f"{row.executor} runs it"]
    if row.unaligned:
        parts.append("an unaligned product")
    if len(row.kernels) > 1:
        parts.append(f"{len(row.kernels)} kernels")
    if count > 1:
        parts.append(f"{duration(seconds / count)} each")
    if best and seconds:
        parts.append(f"runs at {percent(best / seconds)} of {SPEEDS[row.limit]}")
    else:
        parts.append("it moves and computes nothing: the time is the host's")
    return ", ".join(parts)
