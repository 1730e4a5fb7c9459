"""`python -m tests.fuzz.run --count N --seed S --jobs J --kind K`: random programs, and which are wrong.

Seeds are shared out to forked children, a batch to each; a child that dies or hangs costs its one program, and its last
lines are in the report. The parent itself makes and runs no program: what that begins there (autograd's threads, CUDA)
all later children would find broken. `--replay SEED` prints one program and what becomes of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing as mp
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, BinaryIO

os.environ.setdefault("TESSERA_PROGRAM_CACHE", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from .judge import Verdict, judge  # noqa: E402
from .programs import KINDS, OPTIONAL, kind_of, make  # noqa: E402
from .runs import run  # noqa: E402
from .shrink import manner, shrink  # noqa: E402
from .text import render  # noqa: E402
from .ways import EAGERLY  # noqa: E402

BATCH = 200
PATIENCE = 90.0  # seconds for one program, shrinking it included
FORKED = "fork-based multiprocessing"  # autograd had threads here: what it says there is about the fork
LINES = 12  # of what a child that died has printed


@dataclass
class Report:
    """What became of the programs of a run."""

    programs: int = 0
    kinds: Counter = field(default_factory=Counter)
    outcomes: Counter = field(default_factory=Counter)
    refusals: Counter = field(default_factory=Counter)  # what functional tracing said it does not take
    raised: int = 0  # programs that eager refuses as well
    graphs: int = 0
    eager_graphs: int = 0
    seconds: float = 0.0  # of CPU time
    failures: list[dict] = field(default_factory=list)

    def add(self, seed: int, kind: str, verdict: Verdict, text: str = "") -> None:
        self.programs += 1
        self.kinds[kind] += 1
        self.outcomes[verdict.outcome] += 1
        self.raised += verdict.raised
        self.graphs += verdict.graphs
        self.eager_graphs += verdict.eager
        if verdict.outcome == "refused":
            self.refusals[manner(verdict.reason)] += 1
        if verdict.outcome == "wrong":
            manner_ = manner(verdict.reason)
            self.failures.append(
                {"seed": seed, "kind": kind, "manner": manner_, "reason": verdict.reason, "text": text}
            )


@dataclass
class Child:
    """A process that runs programs, and those that it has not told of yet."""

    process: Any
    left: list[tuple[int, str]]
    log: BinaryIO  # what is printed there
    since: float = field(default_factory=time.monotonic)

    def went_on(self) -> None:
        self.left, self.since = self.left[1:], time.monotonic()

    def last_lines(self) -> str:
        self.log.seek(0)
        return "\n".join(self.log.read().decode(errors="replace").splitlines()[-LINES:])


def one(seed: int, kind: str, shrinking: bool = True) -> tuple[Verdict, str]:
    """What becomes of a program, and its text, made small if it is wrong."""
    program = make(seed, kind)
    verdict = judge(program.text, kind)
    if verdict.outcome != "wrong" or not shrinking:
        return verdict, program.text
    nodes, reason = shrink(program, verdict.reason)
    return Verdict(**(asdict(verdict) | {"reason": reason})), render(nodes)


def child(seeds: list[tuple[int, str]], shrinking: bool, pipe: Connection, log: BinaryIO) -> None:
    torch.set_num_threads(1)
    for printed in (1, 2):  # by C++, before it aborts
        os.dup2(log.fileno(), printed)
    sys.stdout = sys.stderr = open(log.fileno(), "w", buffering=1, closefd=False)  # noqa: SIM115
    for seed, kind in seeds:
        os.ftruncate(log.fileno(), 0)  # what earlier programs printed is nobody's business
        before = time.process_time()
        verdict, text = one(seed, kind, shrinking=False)
        if verdict.outcome == "wrong" and shrinking:
            # Half a program may leave anything behind, and other programs come after it.
            small = _elsewhere(one, seed, kind, patience=PATIENCE / 2)[0]
            if small and small[0].outcome == "wrong" and FORKED not in small[0].reason:
                verdict, text = small
        pipe.send((seed, kind, verdict, text, time.process_time() - before))
    pipe.close()


def sweep(seeds: list[tuple[int, str]], jobs: int = 1, shrinking: bool = True, quiet: bool = True) -> Report:
    """Run these programs in `jobs` children at a time."""
    report, context = Report(), mp.get_context("fork")
    waiting = [seeds[i : i + BATCH] for i in range(0, len(seeds), BATCH)][::-1]
    running: dict[Connection, Child] = {}
    begun = shown = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            batch = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            log = tempfile.TemporaryFile("ab+")  # noqa: SIM115  it goes with the child's entry
            process = context.Process(target=child, args=(batch, shrinking, theirs, log))
            process.start()
            theirs.close()
            running[ours] = Child(process, list(batch), log)
        for pipe in wait(list(running), timeout=1.0):
            try:
                seed, kind, verdict, text, spent = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                waiting += _ended(running.pop(pipe), report, "the process died")  # type: ignore[arg-type]
                continue
            report.add(seed, kind, verdict, text)
            report.seconds += spent
            running[pipe].went_on()  # type: ignore[index]
            if verdict.outcome == "wrong" and not quiet:
                print(f"--- {kind} {seed}: {verdict.reason}\n{text}\n", flush=True)
        for pipe, one_child in list(running.items()):
            if time.monotonic() - one_child.since > PATIENCE:
                one_child.process.kill()
                waiting += _ended(running.pop(pipe), report, f"no end after {PATIENCE:.0f} s")
        if not quiet and time.monotonic() - shown > 30:
            shown = time.monotonic()
            print(
                f"{report.programs} programs in {shown - begun:.0f} s: {dict(report.outcomes)}",
                file=sys.stderr,
                flush=True,
            )
    return report


def _ended(child: Child, report: Report, why: str) -> list[list[tuple[int, str]]]:
    """Note the program at which a child ended too early, if it did; give the seeds that are left."""
    child.process.join()
    if not child.left:
        return []
    (seed, kind), *rest = child.left
    text = _elsewhere(_text, seed, kind)[0] or "(the program could not be made again)"
    outcome = "wrong"
    if child.process.exitcode < 0 and _elsewhere(_run_eagerly, text)[1] < 0:  # eager does not survive it either
        outcome = "invalid"
    reason = f"{why} (exit code {child.process.exitcode})\n{child.last_lines()}".rstrip()
    report.add(seed, kind, Verdict(outcome, reason), text)
    return [rest] if rest else []


def _text(seed: int, kind: str) -> str:
    return make(seed, kind).text


def _run_eagerly(text: str) -> None:
    run(text, EAGERLY)


def _elsewhere(fn: Callable, *args: object, patience: float = PATIENCE) -> tuple[Any, int]:
    """What a function gives in a process of its own, if anything, and that process's exit code: it may die of it."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(fn(*args)))
    process.start()
    theirs.close()
    try:
        given = ours.recv() if ours.poll(patience) else None
    except EOFError:
        given = None
    process.join(1.0)
    code = process.exitcode or 0
    process.kill()
    process.join()
    return given, code


def main() -> int:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # programs are the CPU's
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it warns of every `item` that breaks a graph
    options = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--seed", type=int, default=0, help="the first one")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--kind", default="all", help=f"all, or of {', '.join([*KINDS, *OPTIONAL])}, joined by commas")
    options.add_argument("--json", default="", help="where failures are written")
    options.add_argument("--replay", type=int, help="one seed: print it and what becomes of it")
    options.add_argument("--whole", action="store_true", help="do not make failing programs smaller")
    given = options.parse_args()
    kinds = given.kind.split(",")
    if unknown := set(kinds) - {"all", *KINDS, *OPTIONAL}:
        options.error(f"unknown kind {unknown.pop()!r}")

    def kind(seed: int) -> str:
        return kind_of(seed) if kinds == ["all"] else kinds[seed % len(kinds)]

    if given.replay is not None:
        print(make(given.replay, kind(given.replay)).text)
        verdict, text = one(given.replay, kind(given.replay), not given.whole)
        print(f"\n{verdict}\n{verdict.reason}\n" + ("" if verdict.outcome != "wrong" else text))
        return verdict.outcome == "wrong"
    seeds = [(s, kind(s)) for s in range(given.seed, given.seed + given.count)]
    report = sweep(seeds, given.jobs, not given.whole, quiet=False)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(vars(report), file, indent=1)
    print(f"{report.programs} programs {dict(report.kinds)}: {dict(report.outcomes)}; eager refuses {report.raised}")
    print(f"{report.graphs} graphs compiled, {report.eager_graphs} ran eagerly; {report.seconds:.0f} s of CPU time")
    for name, many in report.refusals.most_common():
        print(f"{many:5} refused: {name}")
    for name, many in Counter(f["manner"] for f in report.failures).most_common():
        print(f"{many:5} {name}   {[f['seed'] for f in report.failures if f['manner'] == name][:8]}")
    return bool(report.failures)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main())
