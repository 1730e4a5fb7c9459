"""How time is taken. On a CPU in CPU seconds where it can be, since the machine may be shared; on a GPU by its events.

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

import torch

Samples = dict[str, list[float]]
Block = Callable[[Callable[[], object], int], float]  # seconds per call of so many calls in a row


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
    block: Block | None = None,
) -> Samples:
    """Seconds per call: `rounds` samples for each name, each the mean of `repeat` calls in a row.

    `clock` is read around them, or `block` takes the time its own way.

    Every call runs once before anything is timed. Every other round goes through the names backwards, so that
    none always follows the same neighbour. The garbage collector runs between blocks, never in one.
    """
    block = block or clocked_block(clock)
    for call in calls.values():
        call()
    samples: Samples = {name: [] for name in calls}
    gc.collect()
    gc.freeze()  # what is alive now stays: a collection between blocks then costs next to nothing
    gc.disable()
    try:
        for number in range(rounds):
            for name in list(calls)[:: -1 if number % 2 else 1]:
                samples[name].append(block(calls[name], repeat))
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return samples


def clocked_block(clock: Callable[[], float]) -> Block:
    def block(call: Callable[[], object], repeat: int) -> float:
        start = clock()
        for _ in range(repeat):
            call()
        return (clock() - start) / repeat

    return block


def timed_block(device: str) -> Block:
    """By the GPU's own events, from an idle GPU on; on a CPU by the clock."""
    if device != "cuda":
        return clocked_block(time.perf_counter)

    def block(call: Callable[[], object], repeat: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeat):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / repeat

    return block


def ratio(samples: Samples, who: str, peer: str) -> float:
    """How many times `peer`'s cost `who` has: the median of the ratios round by round."""
    return median(a / b for a, b in zip(samples[who], samples[peer], strict=True))


def in_fresh_process(module: str, task: str, *, threads: int = 1, **options: object) -> Any:
    """Run `python -m module task options` in its own process, on so many threads and without anyone's caches.

    The child prints its result as JSON on its last line of output.
    """
    without = {
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile in the process whose time is taken
    }
    with tempfile.TemporaryDirectory() as empty:
        return in_process(module, task, without | {"TESSERA_CACHE": empty}, **options)


def in_process(module: str, task: str, environment: Mapping[str, str], **options: object) -> Any:
    """The same with an environment of the caller's."""
    command = [sys.executable, "-m", module, task, json.dumps(options)]
    whole = os.environ | environment
    done = subprocess.run(command, env=whole, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"expected {task} {options} to be measured, got exit {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def wait(device: str) -> None:
    """Until the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def tidy(device: str) -> None:
    """Give back the GPU memory that nobody holds. That of a CPU is not measured, and collecting takes long."""
    if device != "cuda":
        return
    gc.collect()
    try:
        torch.cuda.empty_cache()
    except RuntimeError:  # the device failed; `dead` says so
        return


def dead(device: str) -> str:
    """Why the device answers no more; empty while it does."""
    try:
        torch.ones(1, device=device).sum().item()
        wait(device)
    except RuntimeError as error:
        return f"the device failed before: {short(error)}"
    return ""


def short(error: BaseException) -> str:
    """An error in a line."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
