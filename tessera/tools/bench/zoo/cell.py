"""One measurement of the zoo: a model and a contestant, alone in this process.

In: which, where, how many rounds, and a file. Out: the figures of a `Cell`, as JSON in that file. First the results are
held against the same model in float32, as eager computes it; what is wrong is not timed. Every process computes that
reference itself, from the same seed: a step of eager takes less time than its gradients take on the way through a file.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tessera.tools.bench.measure import interleave, short, timed_block, wait
from tessera.tools.bench.model_contestants import EAGER, Run, compiler, enter, off
from tessera.tools.bench.model_floor import products_floor
from tessera.tools.bench.model_run import BLOCK, Judge
from tessera.tools.bench.zoo.registry import Entry, entries
from tessera.tools.bench.zoo.results import ERROR, OK, WRONG

SETTLE = 6  # calls after the first, over which the peak is taken: whoever captures a graph has captured it then
HOST_CALLS, HOST_ROUNDS = 10, 9
Figures = dict[str, object]
Gate = Callable[[], None]


def measure(name: str, who: str, tiny: bool, device: str, rounds: int, kernels: int, gate: Gate) -> Figures:
    """The figures of a cell; an error is one of them. `gate` is called between the first call and what is timed."""
    (entry,) = [one for one in entries(tiny) if one.name == name]
    figures: Figures = {"status": OK}
    try:
        if run := prepare(figures, entry, who, device, gate):
            fill(figures, entry, run, device, rounds)
            if kernels and device == "cuda":
                figures["kernels"] = largest_kernels(run.call, kernels)
    except Exception as error:  # a cell's error costs that cell
        figures |= {"status": ERROR, "why": short(error)}
    return figures


def prepare(figures: Figures, entry: Entry, who: str, device: str, gate: Gate) -> Run | None:
    """Compile and check. Out: what can be timed, if it is right."""
    job = entry.job
    model = job.make(device)
    judge = Judge(job, model, device)
    compile_something(who, device, job.trains)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    run = enter(who, job, model)
    wait(device)
    start = time.perf_counter()
    out = run.call()
    wait(device)
    figures["first"] = time.perf_counter() - start
    got = run.results(out)
    figures |= errors(got, judge)
    if refused(figures, judge.mistake(got)):
        return None
    del got, out
    gate()
    torch.backends.cudnn.benchmark = device == "cuda"  # for everyone: the library's best convolutions, chosen alone
    if who == EAGER:
        figures["floor"] = products_floor(run.call, device)
    figures["peak"] = peak(run.call, before, device)
    refused(figures, judge.mistake(run.results(run.call())), "a later call: ")
    return run if figures["status"] == OK else None


def fill(figures: Figures, entry: Entry, run: Run, device: str, rounds: int) -> None:
    figures["samples"] = samples = timed(run.call, device, rounds)
    figures["seconds"] = median(samples)
    if entry.network.small:
        figures["host"] = host_seconds(run.call, device)


def refused(figures: Figures, reason: str, when: str = "") -> bool:
    if reason:
        figures |= {"status": WRONG, "why": when + reason}
    return bool(reason)


def compile_something(who: str, device: str, trains: bool) -> None:
    """Have the compiler compile a tiny unrelated function: what it imports is not part of a model's first call."""
    with torch.set_grad_enabled(trains):
        out = compiler(who)(lambda x: x.sin() * 2)(torch.ones(2, device=device, requires_grad=trains))
        if trains:
            out.sum().backward()


def errors(got: dict[str, Tensor], judge: Judge) -> Figures:
    """How far a contestant and eager are from float32. Gradients that cancel to nothing have no digit that counts."""
    exact = {name: want for name, want in judge.exact.items() if name in got}
    pairs = {name: (off(got[name], want), off(judge.eager[name], want)) for name, want in exact.items()}
    error, eager_error = pairs.pop(next(iter(pairs)))  # of the loss, or of the result
    counted = [pair for pair in pairs.values() if pair[1] <= 1]
    return {
        "error": error,
        "eager_error": eager_error,
        "gradient_error": max((ours for ours, _ in counted), default=None),
        "eager_gradient_error": max((eager for _, eager in counted), default=None),
    }


def peak(call: Callable[[], object], before: int, device: str) -> int | None:
    """The most memory over a few calls, without what this process held before the contestant came."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(SETTLE):
        call()
    wait(device)
    return torch.cuda.max_memory_allocated() - before if device == "cuda" else None


def timed(call: Callable[[], object], device: str, rounds: int) -> list[float]:
    block = timed_block(device)
    repeat = max(1, min(200, round(BLOCK / max(block(call, 1), 1e-6))))
    return interleave({"": call}, rounds=rounds, repeat=repeat, block=block)[""]


def host_seconds(call: Callable[[], object], device: str) -> float:
    """What the host takes for a step, which it hands to an idle device."""
    samples = []
    for _ in range(HOST_ROUNDS):
        wait(device)
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        samples.append((time.perf_counter() - start) / HOST_CALLS)
    return median(samples)


def largest_kernels(call: Callable[[], object], count: int) -> list[tuple[str, int, float]]:
    """A step's kernels that take the most time: name, launches, seconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        wait("cuda")
    ranked = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
    return [(event.key, event.count, event.self_device_time_total / 1e6) for event in ranked[:count]]


def main(order: str, file: str, ready: str) -> None:
    warnings.filterwarnings("ignore")

    def gate() -> None:
        Path(ready).touch()
        sys.stdin.readline()

    Path(file).write_text(json.dumps(measure(**json.loads(order), gate=gate)))


if __name__ == "__main__":
    main(*sys.argv[1:])
