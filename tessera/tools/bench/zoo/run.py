"""Which measurements of the zoo are made, each in a process of its own with a time limit.

In: options. Out: `Results`, in the file after every measurement. A crash, too little memory or a compiler that hangs
costs one cell. After the deadline nothing is begun; a later run goes on from the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tessera.tools.bench.model_contestants import EAGER, INDUCTOR, OURS
from tessera.tools.bench.model_first import CACHES
from tessera.tools.bench.zoo.registry import Entry, entries
from tessera.tools.bench.zoo.results import ERROR, LATE, Cell, Results, code, here

CHILD = "tessera.tools.bench.zoo.cell"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What to measure. After `deadline` seconds nothing is begun; after `limit` seconds a measurement is stopped."""

    only: tuple[str, ...] = ()
    held: bool = False
    who: tuple[str, ...] = (EAGER, INDUCTOR, OURS)
    device: str = "cuda"
    tiny: bool = False
    rounds: int = 7
    deadline: float | None = None
    limit: float = 300.0
    resume_ours: bool = False
    retry: bool = False

    def entries(self) -> list[Entry]:
        return entries(self.tiny, self.only, self.held)


def run(options: Options, results: Results, say: Say, done: Callable[[Cell], None] = lambda cell: None) -> list[str]:
    """Fill `results` with what was asked for. Out: the names of what there was no time for."""
    start, place, sources = time.monotonic(), here(options.device), code()
    left: list[str] = []
    for entry in options.entries():
        size = entry.job.size
        for who in options.who:
            key = (entry.name, size, options.device, who)
            if known := results.reusable(key, entry, place, options.resume_ours, options.retry):
                results.show(known)
                continue
            if options.deadline is not None and time.monotonic() - start >= options.deadline:
                left.append(f"{entry.name} {who}")
                continue
            say(f"{entry.name} {size}: {who}")
            began = time.monotonic()
            order = {"name": entry.name, "who": who, "tiny": options.tiny, "device": options.device}
            figures = in_child({**order, "rounds": options.rounds}, options.limit)
            wall = round(time.monotonic() - began, 1)
            cell = Cell(*key, entry.definition, place, wall=wall, code=sources, **figures)
            results.add(cell)
            done(cell)
    return left


def in_child(order: Mapping[str, object], limit: float, module: str = CHILD) -> dict:
    """A measurement in a process of its own, with empty caches: its figures, or how it ended."""
    with tempfile.TemporaryDirectory(prefix="tessera-zoo-", ignore_cleanup_errors=True) as folder:
        file, log = Path(folder) / "figures.json", Path(folder) / "log"
        caches = {variable: str(Path(folder) / variable.lower()) for variable in CACHES}
        command = [sys.executable, "-m", module, json.dumps(order), str(file)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env=os.environ | caches | {"HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                return {"status": LATE, "why": f"stopped after {limit:.0f} s"}
            finally:
                with contextlib.suppress(ProcessLookupError):  # and whatever it started
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code == 0 and file.exists():
            return json.loads(file.read_text())
        said = log.read_text(errors="replace").strip().splitlines()
        return {"status": ERROR, "why": f"ended with code {code}: {said[-1][:200] if said else 'it said nothing'}"}
