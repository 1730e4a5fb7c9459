"""A worker of the battery: takes the names of cases on standard input, writes outcomes on standard output.

It is given the module that holds the sections. A message is one line of JSON: `{"section", "case", "device"}` comes in;
for every part `{"part": …, "status": …}` goes out, and `{"done": true}` after a case. What a program prints goes
to standard error. A worker whose device no longer answers says `{"broken": true}`, and the pool starts another one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable

import torch

from tessera.tools.battery.case import DETAILS, Section, Skip, Wrong, short

BROKEN = ("CUDA error", "device-side assert", "an illegal memory access", "CUBLAS_STATUS", "CUDNN_STATUS")


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what programs print is not an outcome
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # TF32 keeps 10 bits, and which convolutions use it depends on layout and algorithm: float32 means float32 here.
    torch.backends.cudnn.allow_tf32 = False

    def tell(**message: object) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    sections: dict[str, Section] = importlib.import_module(sys.argv[1]).SECTIONS
    tell(ready=True)
    seen: set[str] = set()
    for line in sys.stdin:
        told = json.loads(line)
        broken = run_case(sections[told["section"]], told["case"], told["device"], tell)
        if told["section"] not in seen:  # what a section has imported stays; to look through it after each case is slow
            seen.add(told["section"])
            gc.freeze()
        tell(done=True, broken=broken)
        if broken:
            return


def run_case(section: Section, case: str, device: str, tell: Callable[..., None]) -> bool:
    """Run all parts of a case; is this process of no use any more?"""
    if section.report is not None:
        for part, status, why, seconds, details in section.report(case, device):
            tell(part=part, status=status, why=why, seconds=seconds, details=details)
        return False
    assert section.parts is not None
    broken, start = False, time.perf_counter()
    try:
        for part, run in section.parts(case, device):
            fresh()
            status, why, details = status_of(run, device)
            seconds = round(time.perf_counter() - start, 3)
            tell(part=part, status=status, why=why, seconds=seconds, details=details)
            broken = status == "error" and any(mark in why for mark in BROKEN)
            if broken:
                return True
            start = time.perf_counter()
    except Exception as error:
        seconds = round(time.perf_counter() - start, 3)
        tell(part="", status="error", why=short(error), seconds=seconds, details=details_of(error))
        return any(mark in str(error) for mark in BROKEN)
    finally:
        torch.compiler.reset()
        gc.collect()
        if device == "cuda" and not broken:
            torch.cuda.empty_cache()
    return broken


def fresh() -> None:
    """Nothing of the part before: neither what was compiled nor random numbers."""
    torch.compiler.reset()
    torch.manual_seed(0)
    random.seed(0)


def status_of(run: Callable[[], None], device: str) -> tuple[str, str, str]:
    try:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    except Skip as reason:
        return "skipped", short(reason), ""
    except Wrong as difference:
        return "wrong", short(difference), str(difference)[:DETAILS]
    except Exception as error:
        return "error", short(error), details_of(error)
    return "pass", "", ""


def details_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-DETAILS:]


if __name__ == "__main__":
    main()
