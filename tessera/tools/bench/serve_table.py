"""`tessera bench serve --table`: every figure that serving is held to, each job in a process of its own.

In: names of jobs, seconds that they may take together, and rows of earlier runs. Out: rows, those of earlier runs where
a job was not measured again. A job that fails, or that the deadline stops, leaves a row that says so; the others go on.
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
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tessera.tools.bench import serve_offline as offline
from tessera.tools.bench import serve_outside as outside
from tessera.tools.bench import serve_promises as promises
from tessera.tools.bench.serve_place import Measured, Place

JOBS: dict[str, Callable[[Place], Iterator[Measured]]] = {
    "qwen": offline.qwen, "llama": offline.llama, "fp8": offline.fp8, "one": offline.one, "int4": offline.int4,
    "http": outside.http, "long": offline.long, "prefix": offline.prefix, "idle": promises.idle,
    "artifact": outside.artifact, "folder": outside.folder, "deterministic": offline.deterministic,
    "repeats": promises.repeats, "tokens": promises.tokens, "huggingface": offline.huggingface,
}  # fmt: skip
ROW = "row "  # what a line of a job's output begins with that holds a figure


def known(path: Path | None) -> list[Measured]:
    """The rows of an earlier run."""
    if path is None or not path.is_file():
        return []
    fields = Measured.__dataclass_fields__
    rows = [Measured(**{name: row[name] for name in fields}) for row in json.loads(path.read_text())["rows"]]
    made = {(row.job, row.what) for row in compared(rows)}  # they are made anew
    return [row for row in rows if row.job in JOBS and (row.job, row.what) not in made]


def measured(
    names: Sequence[str], place: Place, seconds: float | None, before: Sequence[Measured],
    done: Callable[[list[Measured], list[Measured]], None] = lambda new, rows: None,
) -> list[Measured]:  # fmt: skip
    """The rows of these jobs, after those of others that are known already. `done` gets those of each job and all, as
    they are made."""
    until, rows = None if seconds is None else time.monotonic() + seconds, list(before)
    for name in names or list(JOBS):
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            place.say(f"{name}: no time is left for it")
            continue
        new = own_process(name, place, left)
        rows = [*(row for row in rows if row.job != name), *new]
        rows.sort(key=lambda row: list(JOBS).index(row.job))
        done(new, rows)
    return rows


def own_process(name: str, place: Place, seconds: float | None) -> list[Measured]:
    """One job in its own process: what it leaves in memory, and how it fails, is no business of the others."""
    place.say(name)
    order = json.dumps({"job": name, "device": place.device, "tiny": place.tiny, "options": place.options})
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, order], stdout=subprocess.PIPE, stderr=said, text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"}, start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=seconds)
            why = "" if process.returncode == 0 else f"ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            _end(process)
            out, _ = process.communicate()
            why = f"stopped after {seconds:.0f} s"
        finally:
            _end(process)
        said.seek(0)
        last = said.read().strip()[-600:]
    rows = [Measured(**json.loads(line[len(ROW) :])) for line in out.splitlines() if line.startswith(ROW)]
    return rows if not why else [*rows, Measured(name, "failed", None, note=f"{why}: {last}")]


def _end(process: subprocess.Popen[str]) -> None:
    """End a job, however it went, and all that it has started: the next one has the machine to itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def compared(rows: Sequence[Measured]) -> list[Measured]:
    """Figures that are made of two jobs' figures."""
    rates = {row.job: row.value for row in rows if row.what == "throughput" and row.value}
    made = []
    if "qwen" in rates and "huggingface" in rates:
        times = rates["qwen"] / rates["huggingface"]
        made.append(Measured("qwen", "times huggingface", times, "x", 3.0))
    if "qwen" in rates and "deterministic" in rates:
        price = 100 * (1 - rates["deterministic"] / rates["qwen"])
        made.append(Measured("deterministic", "price", price, "%", 15.0, False, 0.0))
    return made


def main() -> None:
    order = json.loads(sys.argv[1])

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    place = Place(order["device"], order["tiny"], say, order["options"])
    try:
        for row in JOBS[order["job"]](place):
            print(ROW + json.dumps(asdict(row)), flush=True)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
        print(ROW + json.dumps(asdict(Measured(order["job"], "failed", None, note=told[-600:]))), flush=True)


if __name__ == "__main__":
    main()
