"""First calls of `tessera bench models --first`: each in a process of its own, twice.

The first process finds empty caches (cold) and leaves them filled for the second (warm). In both, the compiler has
compiled one tiny unrelated function before, so that imports and the start of the device are not counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tessera.tools.bench.measure import in_process, short, wait
from tessera.tools.bench.model_contestants import EAGER, compiler, enter
from tessera.tools.bench.model_jobs import Job, jobs
from tessera.tools.bench.model_report import Row

CACHES = ("TESSERA_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def first_calls(row: Row, job: Job, who: Sequence[str], tiny: bool, device: str, say: Callable[[str], None]) -> None:
    """Add the first calls of every compiler to a row."""
    for name in who:
        if name == EAGER or name in row.errors:
            continue
        with tempfile.TemporaryDirectory() as folder:
            environment = {variable: str(Path(folder) / variable.lower()) for variable in CACHES}
            for kind, times in (("cold", row.cold), ("warm", row.warm)):
                say(f"{job}: first call of {name}, {kind}")
                arguments = {"job": str(job), "who": name, "tiny": tiny, "device": device}
                try:
                    times[name] = in_process(__name__, "first_call", environment, **arguments)
                except RuntimeError as error:
                    row.errors[f"{name}, {kind}"] = short(error)
                    break


def first_call(job: str, who: str, tiny: bool, device: str) -> float:
    """In the child: seconds of a first call by the clock, until the device is done."""
    chosen = next(one for one in jobs(tiny) if str(one) == job)
    workload = chosen.make(device)
    with torch.set_grad_enabled(chosen.trains):
        warm = compiler(who)(lambda x: x.sin() * 2)(torch.ones(2, device=device, requires_grad=chosen.trains))
        if chosen.trains:
            warm.sum().backward()
    run = enter(who, chosen, workload)
    wait(device)
    start = time.perf_counter()
    run.call()
    wait(device)
    return time.perf_counter() - start


def main(task: str, options: str) -> None:
    assert task == first_call.__name__
    print(json.dumps(first_call(**json.loads(options))))


if __name__ == "__main__":
    main(*sys.argv[1:])
