"""The command line of the battery: `tessera check --battery --device cuda`.

It runs what the sections hold over a pool of workers, prints one table and a line for whatever is not right, and
exits 1 if anything is not. What cannot run here is said.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from tessera.tools.battery.case import BAD, Case, Missing, Outcome
from tessera.tools.battery.pool import Pool
from tessera.tools.battery.sections import QUICK, SECTIONS
from tessera.tools.battery.table import bad, facts, line, table
from tessera.tools.command import chosen_device, console, output_file
from tessera.tools.machine import machine
from tessera.util.errors import OptionError
from tessera.util.units import counted


def parser() -> ArgumentParser:
    root = ArgumentParser(prog="tessera check --battery", description="try everything on this machine against eager")
    root.add_argument("--device", choices=("cpu", "cuda"), help="where (CUDA if there is a GPU)")
    root.add_argument("--sections", nargs="+", metavar="NAME", help=f"some of {', '.join(SECTIONS)}")
    root.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="cases whose names match, such as 'llama*'"
    )
    root.add_argument("--jobs", type=int, help="worker processes (one a core)")
    root.add_argument("--seconds", type=float, default=540.0, help="begin nothing after so many; what is left is said")
    root.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th case, beginning with the I-th")
    root.add_argument("--rest", metavar="FILE", help="only what found no time in the run that wrote this --json")
    root.add_argument("--quick", action="store_true", help="a few cases of every section, for a minute on two cores")
    root.add_argument("--json", type=output_file, metavar="FILE", help="write every outcome there")
    root.add_argument("--list", action="store_true", help="print the names of the cases and run nothing")
    return root


def main(argv: Sequence[str]) -> int:
    return run_battery(parser().parse_args(argv))


def run_battery(args: Namespace) -> int:
    """Choose, run, show, write."""
    device = chosen_device(args)
    cases, notes = chosen(args, device)
    out = console()
    if args.list:
        for case in cases:
            out.print(f"{case.section} {case.name}", markup=False, highlight=False)
        return 0
    start = time.monotonic()
    jobs = args.jobs or len(os.sched_getaffinity(0))
    told = _Progress(len(cases), start)
    outcomes = Pool(cases, device, jobs, args.seconds, told).run() if cases else []
    wall = time.monotonic() - start
    out.print(f"{machine()}; {device}, {jobs} workers, {wall:.0f} s", soft_wrap=True)
    out.print(table(outcomes))
    for outcome in bad(outcomes):
        out.print(line(outcome), style="red", markup=False, soft_wrap=True)
    if left := [o for o in outcomes if o.status == "not run"]:
        names = ", ".join(f"{o.section}/{o.case}" for o in left[:8])
        out.print(
            f"no time was left for {counted(len(left), 'case')}: {names}{', …' if len(left) > 8 else ''}", markup=False
        )
    for note in notes:
        out.print(f"not run: {note}", style="red" if device == "cuda" else None, markup=False, soft_wrap=True)
    document = facts(outcomes, notes, device, str(machine()), wall)
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    return int(not document["ok"])


def chosen(args: Namespace, device: str) -> tuple[list[Case], list[str]]:
    """The cases that were asked for, and a note for every section that cannot run here."""
    names = args.sections or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        raise OptionError(f"--sections: unknown {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    cases: list[Case] = []
    notes: list[str] = []
    for name in names:
        try:
            of_section = SECTIONS[name].cases(device)
        except Missing as reason:
            notes.append(f"{name}: {reason}")
            continue
        if args.quick:
            of_section = [
                case for case in of_section if any(fnmatch(case.name, pattern) for pattern in QUICK.get(name, ()))
            ]
        cases += of_section
    if args.only:
        cases = [case for case in cases if any(fnmatch(case.name, pattern) for pattern in args.only)]
    if args.rest:
        left = without_time(Path(args.rest))
        cases = [case for case in cases if (case.section, case.name) in left]
    index, count = shard(args.shard)
    return cases[index::count], notes


def without_time(path: Path) -> set[tuple[str, str]]:
    """The cases, with their sections, that an earlier run did not get to."""
    try:
        outcomes = json.loads(path.read_text())["outcomes"]
        return {(o["section"], o["case"]) for o in outcomes if o["status"] == "not run"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise OptionError(f"--rest: expected what --json wrote, got {path} ({told})") from error


def shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise OptionError(f"--shard: expected I/N with I below N, such as 0/2, got {text!r}")
    return int(index), int(count)


class _Progress:
    """A line for whatever is not right, at once, and one now and then for the rest."""

    def __init__(self, cases: int, start: float) -> None:
        self.cases, self.start, self.seen, self.shown = cases, start, 0, start
        self.names: set[tuple[str, str]] = set()

    def __call__(self, outcome: Outcome) -> None:
        self.seen += 1
        self.names.add((outcome.section, outcome.case))
        now = time.monotonic()
        if outcome.status in BAD:
            print(line(outcome), file=sys.stderr, flush=True)
        if now - self.shown > 15:
            self.shown = now
            message = f"[{now - self.start:.0f} s] {len(self.names)} of {self.cases} cases begun, {self.seen} outcomes"
            print(message, file=sys.stderr, flush=True)
