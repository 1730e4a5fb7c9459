"""`tessera bench models`: whole models on one GPU, every contestant in one run.

Time, ratio to each peer, peak memory, first call and the fraction of the floor, for training, whole steps, prefill,
decoding and more. `--tiny` runs the same jobs at sizes for a CPU, which says nothing about speed.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from tessera.tools.bench.model_contestants import EAGER, INDUCTOR, MODES, OURS, THUNDER
from tessera.tools.bench.model_report import Row, listed, table
from tessera.tools.bench.model_run import Options, run, sections
from tessera.tools.bench.report import Outcome, to_json
from tessera.tools.command import chosen_device
from tessera.tools.machine import machine
from tessera.util.errors import OptionError

WHO = (EAGER, INDUCTOR, OURS)
SECTIONS = sections()


def outcome(args: Namespace, say: Callable[[str], None]) -> Outcome:
    """Measure what the command line asks for. Rows go to the file of `--json` and to stderr as they are made."""
    options = options_of(args)

    def done(rows: list[Row]) -> None:
        print(rows[-1].line(), file=sys.stderr)
        if args.json and args.json != "-":
            Path(args.json).write_text(json.dumps(to_json(args.suite, machine(), listed(rows)), indent=2) + "\n")

    measured = run(options, say, done)
    skipped = [f"{row.job} {row.size}" for row in measured if "not run" in row.errors]
    note = f"median of {options.rounds} rounds" + (f"; not run: {', '.join(skipped)}" if skipped else "")
    return Outcome(note, table(measured), listed(measured), any(row.errors for row in measured))


def options_of(args: Namespace) -> Options:
    device = chosen_device(args, "try --device cpu --tiny")
    if device == "cpu" and not args.tiny:
        raise OptionError("whole models want a CUDA device; --tiny runs them at sizes for a CPU")
    return Options(
        tuple(args.only),
        _who(args),
        device,
        args.quick,
        args.tiny,
        args.first,
        args.rounds or Options.rounds,
        args.deadline,
    )


def _who(args: Namespace) -> tuple[str, ...]:
    who = list(args.who or WHO)
    if args.thunder and THUNDER not in who:
        who.insert(-1, THUNDER)
    for name in who:
        if name not in (*WHO, THUNDER):
            raise OptionError(f"--who: expected some of {', '.join((*WHO, THUNDER))} for models, got {name!r}")
    if THUNDER in who and find_spec("thunder") is None:
        raise OptionError("expected Thunder to be installed, got no module of that name; try without --thunder")
    if args.best and INDUCTOR in who:
        at = who.index(INDUCTOR) + 1
        who[at:at] = MODES
    return tuple(who)
