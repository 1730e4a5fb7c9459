"""`python -m tests.fuzz.run --count N --seed S --jobs J --kind K`: random programs, and which are wrong.

Seeds are shared out to forked children, a batch to each; a child that dies or hangs costs its one program.
`--replay SEED` prints one program and what becomes of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing as mp
import os
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait

os.environ.setdefault("TESSERA_PROGRAM_CACHE", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from .judge import Eager, Verdict, judge, run  # noqa: E402
from .programs import KINDS, OPTIONAL, kind_of, make  # noqa: E402
from .shrink import manner, shrink  # noqa: E402
from .text import render  # noqa: E402

BATCH = 200
PATIENCE = 90.0  # seconds for one program, shrinking it included


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


def one(seed: int, kind: str, shrinking: bool = True) -> tuple[Verdict, str]:
    """What becomes of a program, and its text, made small if it is wrong."""
    program = make(seed, kind)
    verdict = judge(program.text, kind)
    if verdict.outcome != "wrong" or not shrinking:
        return verdict, program.text
    nodes, reason = shrink(program, verdict.reason)
    return Verdict(**(asdict(verdict) | {"reason": reason})), render(nodes)


def child(seeds: list[tuple[int, str]], shrinking: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  what programs print is nobody's business
    for seed, kind in seeds:
        before = time.process_time()
        verdict, text = one(seed, kind, shrinking=False)
        if verdict.outcome == "wrong" and shrinking:
            verdict, text = _made_small(seed, kind) or (verdict, text)
        pipe.send((seed, kind, verdict, text, time.process_time() - before))
    pipe.close()


def _made_small(seed: int, kind: str) -> tuple[Verdict, str] | None:
    """In a process of its own: half a program may leave anything behind, and other programs come after it."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(one(seed, kind)))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(PATIENCE / 2) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def sweep(seeds: list[tuple[int, str]], jobs: int = 1, shrinking: bool = True, quiet: bool = True) -> Report:
    """Run these programs in `jobs` children at a time."""
    report, context = Report(), mp.get_context("fork")
    waiting = [seeds[i : i + BATCH] for i in range(0, len(seeds), BATCH)][::-1]
    running: dict[Connection, tuple] = {}
    begun = shown = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            batch = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(batch, shrinking, theirs))
            process.start()
            theirs.close()
            running[ours] = (process, list(batch), time.monotonic())
        for pipe in wait(list(running), timeout=1.0):
            process, left, _ = running[pipe]  # type: ignore[index]
            try:
                seed, kind, verdict, text, spent = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                waiting += _ended(running.pop(pipe), report, "the process died")  # type: ignore[arg-type]
                continue
            report.add(seed, kind, verdict, text)
            report.seconds += spent
            running[pipe] = (process, left[1:], time.monotonic())  # type: ignore[index]
            if verdict.outcome == "wrong" and not quiet:
                print(f"--- {kind} {seed}: {verdict.reason}\n{text}\n", flush=True)
        for pipe, (process, _, since) in list(running.items()):
            if time.monotonic() - since > PATIENCE:
                process.kill()
                waiting += _ended(running.pop(pipe), report, f"no end after {PATIENCE:.0f} s")
        if not quiet and time.monotonic() - shown > 30:
            shown = time.monotonic()
            print(
                f"{report.programs} programs in {shown - begun:.0f} s: {dict(report.outcomes)}",
                file=sys.stderr,
                flush=True,
            )
    return report


def _ended(child: tuple, report: Report, why: str) -> list[list[tuple[int, str]]]:
    """Note the program at which a child ended too early, if it did; give the seeds that are left."""
    process, left, _ = child
    process.join()
    if not left:
        return []
    (seed, kind), *rest = left
    text, outcome = make(seed, kind).text, "wrong"
    if process.exitcode < 0 and _dies_eagerly(text):
        outcome = "invalid"
    report.add(seed, kind, Verdict(outcome, f"{why} (exit code {process.exitcode})"), text)
    return [rest] if rest else []


def _dies_eagerly(text: str) -> bool:
    """Eager PyTorch does not survive this program either."""
    process = mp.get_context("fork").Process(target=run, args=(text, lambda fn: fn, Eager()))
    process.start()
    process.join(PATIENCE)
    died = (process.exitcode or 0) < 0
    process.kill()
    process.join()
    return died


def main() -> int:
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
