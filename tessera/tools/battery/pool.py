"""Runs cases over worker processes: a queue, a time limit a case, a new worker for one that crashed.

In: cases, the device, how many workers, how long. Out: the outcomes. Long cases begin first, so that no long one is
left for the end. Every worker is a process group of its own: what a case started goes when the case is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tessera
from tessera.tools.battery.case import Case, Outcome

SECTIONS = "tessera.tools.battery.sections"  # the module that holds them
START = 180.0  # seconds for a worker to import what it needs


class Worker:
    """One process, and the case it is on."""

    def __init__(self, environment: dict[str, str], log: Path, sections: str) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tessera.tools.battery.worker", sections],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.case: Case | None = None
        self.ready, self.buffer, self.since = False, b"", time.monotonic()

    def give(self, case: Case, device: str) -> None:
        self.case, self.since = case, time.monotonic()
        message = {"section": case.section, "case": case.name, "device": device}
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
        except BrokenPipeError:
            pass  # its end is read from the other pipe

    def messages(self) -> tuple[list[dict], bool]:
        """What it has said since, and whether it has ended."""
        data = self.process.stdout.read()  # type: ignore[union-attr]
        ended = data == b""
        self.buffer += data or b""
        *lines, self.buffer = self.buffer.split(b"\n")
        return [json.loads(line) for line in lines], ended

    @property
    def late(self) -> bool:
        limit = self.case.limit if self.case else START
        return (self.case is not None or not self.ready) and time.monotonic() - self.since > limit

    def stop(self) -> int | None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class Pool:
    """The workers, the queue and the outcomes."""

    def __init__(
        self,
        cases: Sequence[Case],
        device: str,
        jobs: int,
        seconds: float,
        told: Callable[[Outcome], None] = lambda _: None,
        sections: str = SECTIONS,
    ) -> None:
        self.queue = sorted(cases, key=lambda case: -case.seconds)
        self.device, self.jobs, self.told = device, max(1, min(jobs, len(cases))), told
        self.sections = sections
        self.deadline = time.monotonic() + seconds
        self.outcomes: list[Outcome] = []
        self.workers: list[Worker] = []
        self.waiting = selectors.DefaultSelector()

    def run(self) -> list[Outcome]:
        with tempfile.TemporaryDirectory(prefix="tessera-battery-", ignore_cleanup_errors=True) as folder:
            self.folder = Path(folder)
            try:
                for _ in range(self.jobs):
                    self.start()
                while self.workers:
                    self.step()
            finally:
                for worker in list(self.workers):
                    self.end(worker)
        return self.outcomes

    def start(self) -> None:
        number = len(list(self.folder.iterdir()))
        worker = Worker(environment(self.folder), self.folder / f"worker{number}.log", self.sections)
        self.workers.append(worker)
        self.waiting.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

    def end(self, worker: Worker) -> int | None:
        self.waiting.unregister(worker.process.stdout)  # type: ignore[arg-type]
        self.workers.remove(worker)
        return worker.stop()

    def step(self) -> None:
        over = time.monotonic() > self.deadline
        if over and self.queue:
            for case in self.queue:
                self.note(case, "", "not run", "no time was left")
            self.queue.clear()
        for key, _ in self.waiting.select(timeout=0.2):
            self.listen(key.data)
        for worker in list(self.workers):
            if worker.late or (over and worker.case is not None):
                why = "no time was left" if over else f"stopped after {time.monotonic() - worker.since:.0f} s"
                if worker.case is not None:
                    status = "not run" if over and not worker.late else "timeout"
                    self.note(worker.case, "", status, why, time.monotonic() - worker.since)
                self.end(worker)
                self.replace()

    def listen(self, worker: Worker) -> None:
        messages, ended = worker.messages()
        for message in messages:
            if "part" in message:
                assert worker.case is not None
                self.note(worker.case, **message)
            else:
                worker.ready, worker.case = True, None
                ended = ended or bool(message.get("broken"))
        if ended:
            case, code = worker.case, self.end(worker)
            if case is not None:
                self.note(case, "", "error", f"the worker ended with code {code}: {last_line(worker.log)}")
            elif not worker.ready:
                raise RuntimeError(f"a worker does not start: {last_line(worker.log)}")
            self.replace()
        elif worker.ready and worker.case is None:
            if self.queue:
                worker.give(self.queue.pop(0), self.device)
            else:
                self.end(worker)

    def replace(self) -> None:
        if self.queue:
            self.start()

    def note(self, case: Case, part: str, status: str, why: str = "", seconds: float = 0.0, details: str = "") -> None:
        outcome = Outcome(case.section, case.name, part, status, why, round(seconds, 3), details)
        self.outcomes.append(outcome)
        self.told(outcome)


def environment(folder: Path) -> dict[str, str]:
    """One thread a worker, caches of this run alone, nothing from the network."""
    root = str(Path(tessera.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    private = {
        "TESSERA_CACHE": str(folder / "tessera"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": path}
    fixed.setdefault("TESSERA_VERIFY", os.environ.get("TESSERA_VERIFY", "1"))  # kernels are held to their types
    return {**os.environ, **private, **fixed}


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
