"""Reports of graphs as text and in a terminal. Both say the same; the terminal has colour, tables and bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tessera.inspection.memory import Memory, Timeline
from tessera.inspection.reports import GraphReport
from tessera.util.units import counted

SHOWN = 8  # names, guards or lines listed before "and n more"
BARS = "▁▂▃▄▅▆▇█"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def few(items: tuple[str, ...] | list[str], most: int = SHOWN) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def bars(timeline: Timeline, width: int = 40) -> str:
    """The course of memory in a line: one bar an equation, or the most of several."""
    count = len(timeline.during)
    if not count or not timeline.peak:
        return ""
    step = max(1, -(-count // width))
    most = [max(timeline.during[i : i + step]) for i in range(0, count, step)]
    return "".join(BARS[min(7, 8 * n // timeline.peak)] for n in most)


def head(graphs: list[GraphReport]) -> str:
    parts = [
        counted(len(graphs), "graph"),
        counted(sum(bool(g.break_reason) for g in graphs), "graph break"),
        counted(sum(bool(g.recompile_reason) for g in graphs), "recompile"),
    ]
    if eager := sum(bool(g.eager_reason) for g in graphs):
        parts.append(f"{eager} run eagerly")
    return ", ".join(parts)


def text(graphs: list[GraphReport]) -> str:
    lines = [head(graphs)]
    for alike in groups(graphs):
        lines += ["", title(alike)]
        lines += [f"  {label}: {line}" if label else f"    {line}" for label, line in told_once(alike)]
    return "\n".join(lines)


def groups(graphs: list[GraphReport]) -> list[list[GraphReport]]:
    """Graphs of which the same is to be said, but for their names, their times and the values that made them."""
    alike: dict[tuple, list[GraphReport]] = {}
    for g in graphs:
        same = (g.location, g.operators, g.break_reason, g.break_line, g.eager_reason, g.recompile_advice)
        alike.setdefault((*same, *(tuple(collapsed(_programs(g))))), []).append(g)
    return list(alike.values())


def title(alike: list[GraphReport]) -> str:
    g = alike[0]
    names = g.name if len(alike) == 1 else f"{len(alike)} × {g.name} … {alike[-1].name}"
    place = f" at {g.location}" if g.location else ""
    how = "from the cache" if g.from_cache else "compiled"
    seconds = sum(one.seconds for one in alike)
    return f"{names}{place} ({counted(g.operators, 'operator')}, {how} in {seconds:.2f} s)"


def told_once(alike: list[GraphReport]) -> list[tuple[str, str]]:
    """What there is to say of graphs that are alike: of the first of them, and why there are more."""
    first, last = alike[0], alike[-1]
    lines = collapsed(facts(first))
    if last is not first and last.recompile_reason:
        lines.append(("", f"last recompiled: {last.recompile_guard}"))
    return lines


def collapsed(lines: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Equal lines once, with how many there are: layers of a model that are alike."""
    counts = Counter(lines)
    return [(label, line if n == 1 or not label else f"{n} times {line}") for (label, line), n in counts.items()]


def facts(g: GraphReport) -> Iterator[tuple[str, str]]:
    """(what, line) of all there is to say of a graph; a line without a label belongs to the one before."""
    if g.called_at and not g.recompile_reason:
        yield "called at", g.called_at
    if g.inputs:
        yield "inputs", few(g.inputs)
    if g.guards:
        yield "guards", few(g.guards)
    if g.recompile_reason:
        yield "recompiled", f"{g.recompile_guard}" + (f" (called at {g.called_at})" if g.called_at else "")
        if g.recompile_change:
            yield "", f"changed: {g.recompile_change}"
        yield "", f"to do: {g.recompile_advice}"
    if g.break_reason:
        yield "graph break", f"{g.break_line}{': ' if g.break_line else ''}{_first_lines(g.break_reason)}"
        yield "", f"to do: {g.break_advice}"
    if g.repeats:
        yield "blocks", f"{counted(g.repeats, 'call')} traced as one before"
    for line in g.blocks:
        yield "traced by itself", line
    if g.eager_reason:
        yield "runs eagerly", g.eager_reason
    if g.cuda_graph:
        yield "replay", g.cuda_graph
    yield from _programs(g)


def _programs(g: GraphReport) -> Iterator[tuple[str, str]]:
    """Who runs what, what is saved, and memory."""
    for region in g.regions:
        what = "fused" if region.fused else "runs"
        why = f" ({region.why})" if region.why else ""
        yield f"{region.executor} {what}", f"{_operators(region.operators)}{why}{_at(region.lines)}"
    for left in g.unfused:
        yield "not fused", f"{left.reason}: {few(left.results)} ({few(left.operators)}){_at(left.lines)}"
    for line in g.fp8:
        yield "fp8", line
    for line in g.mesh:
        yield "ranks", line
    if g.saved:
        yield "saves for backward", f"{size(g.saved_bytes)}: {few(g.saved)}"
    if g.offloaded or g.offload_note:
        yield "offloads", _offload(g)
    for program in g.memory:
        yield from _memory(program)


def _offload(g: GraphReport) -> str:
    if not g.offloaded:
        return f"nothing: {g.offload_note}"
    moved = f"{size(sum(g.offloaded.values()))} to the host and back a step: {few(tuple(g.offloaded))}"
    return f"{moved}; {g.offload_note}" if g.offload_note else moved


def _memory(program: Memory) -> Iterator[tuple[str, str]]:
    if not program.predicted.during:
        return
    label = f"memory of {program.program}"
    yield label, f"predicted peak {size(program.predicted.peak)} at {program.predicted.at}  {bars(program.predicted)}"
    if program.measured is not None:
        yield "", f"measured peak {size(program.measured.peak)} at {program.measured.at}  {bars(program.measured)}"
    elif program.note:
        yield "", program.note


def _first_lines(reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    explanation = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{lines[0]}; {explanation}" if explanation and explanation != lines[0] else lines[0]


def _operators(operators: tuple[str, ...]) -> str:
    counts = {name: operators.count(name) for name in dict.fromkeys(operators)}
    return few([name if n == 1 else f"{n} × {name}" for name, n in counts.items()])


def _at(lines: tuple[str, ...]) -> str:
    return f" at {few(lines, 4)}" if lines else ""


COLOURS = {"graph break": "red", "recompiled": "yellow", "runs eagerly": "red", "not fused": "magenta"}


def rich_parts(graphs: list[GraphReport]) -> Iterator[RenderableType]:
    yield Text(head(graphs), style="bold")
    for alike in groups(graphs):
        table = Table(title=escape(title(alike)), title_justify="left", show_header=False, box=None, padding=(0, 1))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, line in told_once(alike):
            colour = COLOURS.get(label, "")
            table.add_row(Text(label, style=colour), Text(line, style=colour))
        yield Text()
        yield table
