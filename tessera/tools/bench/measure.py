"""How time is taken. CPU seconds, never wall time: the machine may be shared.

Contestants are always interleaved: one block of each, then the next round, so that a slow minute of the
machine falls on all of them. A ratio is the median of the ratios taken within each round, for the same
reason: many short rounds are steadier than a few long ones.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

Samples = dict[str, list[float]]


def cpu_seconds() -> float:
    """CPU time of this process and of the children it has waited for, such as a C++ compiler."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def interleave(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    repeat: int,
    clock: Callable[[], float] = time.process_time,
) -> Samples:
    """Seconds per call: `rounds` samples for each name, each the mean of `repeat` calls in a row.

    Every call runs once before anything is timed. Every other round goes through the names backwards, so that
    none always follows the same neighbour. The garbage collector runs between blocks, never in one.
    """
    for call in calls.values():
        call()
    samples: Samples = {name: [] for name in calls}
    gc.collect()
    gc.freeze()  # what is alive now stays: a collection between blocks then costs next to nothing
    gc.disable()
    try:
        for number in range(rounds):
            for name in list(calls)[:: -1 if number % 2 else 1]:
                samples[name].append(_block(calls[name], repeat, clock))
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return samples


def _block(call: Callable[[], object], repeat: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeat):
        call()
    return (clock() - start) / repeat


def ratio(samples: Samples, who: str, peer: str) -> float:
    """How many times `peer`'s cost `who` has: the median of the ratios round by round."""
    return median(a / b for a, b in zip(samples[who], samples[peer], strict=True))


def in_fresh_process(module: str, task: str, *, threads: int = 1, **options: object) -> Any:
    """Run `python -m module task options` in its own process, on so many threads and without anyone's caches.

    The child prints its result as JSON on its last line of output.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile in the process whose time is taken
    }
    command = [sys.executable, "-m", module, task, json.dumps(options)]
    with tempfile.TemporaryDirectory() as empty:
        environment["TESSERA_CACHE"] = empty
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"expected {task} {options} to be measured, got exit {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
