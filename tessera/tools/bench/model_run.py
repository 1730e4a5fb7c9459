"""How a job of `tessera bench models` is measured: checked, then its peak, then everyone's time in turns.

Every contestant has a model of its own with equal weights. Its first call is held against the same job done with more
bits; what is wrong is an error and is not timed. Peaks are taken one contestant at a time, without what the others
hold. Then all are timed in rounds, a block of each, and ratios are taken within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from tessera.tools.bench.kernel_cuda import Clock, copy_rate
from tessera.tools.bench.measure import dead, interleave, ratio, short, tidy, timed_block, wait
from tessera.tools.bench.model_contestants import EAGER, OURS, Run, captured, enter, mistake, names, reference
from tessera.tools.bench.model_first import first_calls
from tessera.tools.bench.model_floor import bytes_read, products_floor
from tessera.tools.bench.model_jobs import Job, Made, jobs
from tessera.tools.bench.model_report import Row

Say = Callable[[str], None]
Results = dict[str, Tensor]
BLOCK = 0.02  # seconds that one sample takes at the least
WARM = 2  # calls between the first one and what is timed, over which the peak is taken


@dataclass(frozen=True)
class Options:
    """What to measure. `deadline`: seconds after which no further job is started."""

    only: tuple[str, ...] = ()
    who: tuple[str, ...] = (EAGER, "inductor", OURS)
    device: str = "cuda"
    quick: bool = False
    tiny: bool = False
    first: bool = False
    rounds: int = 7
    deadline: float | None = None

    def jobs(self) -> list[Job]:
        chosen = [job for job in jobs(self.tiny) if not self.only or job.name in self.only]
        return [job for job in chosen if job.quick or not self.quick]


def run(options: Options, say: Say, done: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
    """Measure every job that was asked for. `done` is told of the rows so far after each."""
    torch.backends.cudnn.benchmark = options.device == "cuda"  # for everyone: the library's best convolutions
    start, failed = time.perf_counter(), ""
    copy = copy_rate(Clock(options.device, 10))
    measured: list[Row] = []
    for job in options.jobs():
        row = Row(job.name, job.size, job.kind, str(job.dtype).removeprefix("torch."), options.device)
        measured.append(row)
        late = options.deadline is not None and time.perf_counter() - start > options.deadline
        if failed or late:
            row.errors["not run"] = failed or f"{options.deadline:.0f} seconds were over"
            continue
        began = time.perf_counter()
        try:
            measure(row, job, options, copy, say)
        except Exception as error:  # the next job may do
            row.errors["job"] = short(error)
        failed = dead(options.device)
        row.wall = time.perf_counter() - began
        done(measured)
    return measured


def measure(row: Row, job: Job, options: Options, copy: float, say: Say) -> None:
    """Fill in one row."""
    torch.compiler.reset()
    tidy(options.device)
    calls: dict[str, Callable[[], object]] = {}
    who = names(options.who, job)
    say(f"{job}: the reference and the floor")
    workload = job.make(options.device)
    row.floor = _floor(job, workload, copy, options.device)
    judge = Judge(job, workload, options.device)
    for name in who:
        say(f"{job}: {name}")
        try:
            if name in job.rivals:
                rival = job.rivals[name](options.device)
                row.rivals[name] = _floor(job, rival, copy, options.device)
                calls[name] = _prepare(row, name, Judge(job, rival, options.device))
                del rival
            else:
                calls[name] = _prepare(row, name, judge)
        except Exception as error:
            row.errors[name] = short(error)
        tidy(options.device)
    judge.forget()
    say(f"{job}: everyone in turns")
    _race(row, calls, options)
    calls.clear()
    tidy(options.device)
    if options.first:
        first_calls(row, job, [name for name in who if name not in job.rivals], options.tiny, options.device, say)


class Judge:
    """What a job's first call must give: the job with more bits, and how far eager is from that."""

    def __init__(self, job: Job, workload: Made, device: str) -> None:
        self.job, self.workload, self.device = job, workload, device
        self.exact = _kept(reference(job, workload))
        tidy(device)
        self.eager = _kept(enter(EAGER, job, workload))
        tidy(device)

    def mistake(self, got: Results) -> str:
        return mistake(got, self.eager, self.exact, self.job.dtype, beyond=self.job.beyond)

    def forget(self) -> None:
        self.exact.clear()
        self.eager.clear()


def _kept(run: Run) -> Results:
    return {name: x.detach().clone() for name, x in run.results(run.call()).items()}


def _prepare(row: Row, name: str, judge: Judge) -> Callable[[], object]:
    """Compile, check, and take the peak; what comes back is ready to be timed."""
    job, device, cuda = judge.job, judge.device, judge.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    run = enter(name, job, judge.workload)
    wait(device)
    start = time.perf_counter()
    out = run.call()
    wait(device)
    row.first[name] = time.perf_counter() - start
    _refuse(judge.mistake(run.results(out)))
    del out
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM):
        run.call()
    if cuda:
        wait(device)
        row.peak[name] = torch.cuda.max_memory_allocated() - before
    if job.kind != "decode" or not cuda:
        return run.call
    replay, out = captured(run.call)
    replay()
    wait(device)
    _refuse(judge.mistake(run.results(out)))
    return lambda kept=(run, out): replay()  # a graph does not hold the model, the inputs or the result it points to


class WrongResult(Exception):
    """A contestant's results are not the job's."""


def _refuse(reason: str) -> None:
    if reason:
        raise WrongResult(reason)


def _floor(job: Job, workload: Made, copy: float, device: str) -> float:
    if job.kind == "decode":
        return bytes_read(workload.model, workload.inputs) / copy
    run = enter(EAGER, job, workload)
    run.call()
    return products_floor(run.call, device)


def _race(row: Row, calls: dict[str, Callable[[], object]], options: Options) -> None:
    if not calls:
        return
    block = timed_block(options.device)
    shortest = min(block(call, 1) for call in calls.values())
    repeat = max(1, min(200, round(BLOCK / max(shortest, 1e-6))))
    row.samples = interleave(calls, rounds=options.rounds, repeat=repeat, block=block)
    row.seconds = {name: median(taken) for name, taken in row.samples.items()}
    if OURS in row.samples:
        row.ratios = {peer: ratio(row.samples, OURS, peer) for peer in row.samples if peer != OURS}


def sections(tiny: bool = False) -> Sequence[str]:
    return tuple(dict.fromkeys(job.name for job in jobs(tiny)))
