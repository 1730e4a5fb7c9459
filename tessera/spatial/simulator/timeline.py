"""A run as Perfetto shows it: a process for every core, a thread for everything that can be busy.

In: what was judged. Out: trace events as JSON has them; a cycle is a microsecond of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator

from tessera.spatial.listing.text import action_text
from tessera.spatial.simulator.judge import Judged


def events(judged: Judged) -> Iterator[dict[str, object]]:
    cores = sorted({resource.core for resource in judged.claims})
    numbers = {core: number for number, core in enumerate(cores, 1)}
    for core, number in numbers.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"core {core}"}}
    for thread, (resource, users) in enumerate(sorted(judged.claims.items(), key=lambda item: item[0]), 1):
        place = {"pid": numbers[resource.core], "tid": thread}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": f"{resource.kind} {resource.name}"}}
        for claim in users:
            of = claim.work.step.of
            args = {"line": of.line, "module": of.module, "source": of.source}
            span = {"ts": claim.begin, "dur": claim.end - claim.begin}
            yield {"ph": "X", "name": action_text(of.action), **place, **span, "args": args}
