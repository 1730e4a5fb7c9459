"""A measurement in a process of its own, with empty caches and a time limit.

In: an order. Out: its figures, or how it ended. The process stops when it has compiled and was found right, until it is
told to go on: whoever runs several at once lets one after another be timed.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from tessera.tools.bench.model_first import CACHES
from tessera.tools.bench.zoo.results import ERROR, LATE

CHILD = "tessera.tools.bench.zoo.cell"
READY = "ready"
POLL = 0.02  # seconds between two looks at the processes


class Child:
    """One process. `wall` are the seconds from its start to its end, without those it waited for others."""

    def __init__(self, order: Mapping[str, object], limit: float, module: str = CHILD) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tessera-zoo-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._file, self._log, self._ready = folder / "figures.json", folder / "log", folder / READY
        caches = {variable: str(folder / variable.lower()) for variable in CACHES}
        self._limit, self.wall, self._since = limit, 0.0, time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(order), str(self._file), str(self._ready)],
                env=os.environ | caches | {"HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def busy(self) -> bool:
        """Whether it works: it is neither at its end nor waiting, and has time left."""
        waits = self._ready.exists() or self._process.poll() is not None
        return not waits and time.monotonic() - self._since < self._limit

    def stopped(self) -> None:
        """It was seen to have compiled or ended: what it waits from here on does not count."""
        self.wall = time.monotonic() - self._since

    def finish(self) -> dict:
        """Let it be timed: its figures, or how it ended."""
        began = time.monotonic()
        try:
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError), self._process.stdin as gate:
                    gate.write(b"\n")
            code = self._process.wait(max(self._limit - self.wall, 0))
        except subprocess.TimeoutExpired:
            return {"status": LATE, "why": f"stopped after {self._limit:.0f} s"}
        finally:
            self.wall += time.monotonic() - began
            self.stop()
        return self._figures(code)

    def stop(self) -> None:
        """End it, and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _figures(self, code: int) -> dict:
        if code == 0 and self._file.exists():
            return json.loads(self._file.read_text())
        said = self._log.read_text(errors="replace").strip().splitlines()
        return {"status": ERROR, "why": f"ended with code {code}: {said[-1][:200] if said else 'it said nothing'}"}


def in_children(orders: Sequence[Mapping[str, object]], limit: float, module: str = CHILD) -> list[dict]:
    """Measurements whose processes compile side by side and are timed one after another, when all have compiled."""
    children: list[Child] = []
    try:
        children.extend(Child(order, limit, module) for order in orders)
        working = children
        while working:
            time.sleep(POLL)
            busy = [child for child in working if child.busy]
            for child in working:
                if child not in busy:
                    child.stopped()
            working = busy
        return [{**child.finish(), "wall": round(child.wall, 1)} for child in children]
    finally:
        for child in children:
            child.stop()
