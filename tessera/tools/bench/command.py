"""The command line of `tessera bench`: which suite, how long, against whom, and where the numbers go."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from tessera.tools.bench import core
from tessera.tools.bench.probe import CONTESTANTS
from tessera.tools.bench.report import table, to_json
from tessera.tools.command import Command
from tessera.tools.machine import machine

SUITES = {"core": core}


def arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("suite", choices=SUITES, help="what to measure")
    parser.add_argument("--only", nargs="+", default=[], choices=core.SECTIONS, help="only these sections")
    parser.add_argument("--who", nargs="+", choices=CONTESTANTS, help="only these contestants")
    parser.add_argument(
        "--rounds", type=int, default=3, help="samples to take; more is steadier (default: 3)"
    )
    parser.add_argument("--inductor", action="store_true", help="measure TorchInductor too")
    parser.add_argument("--thunder", action="store_true", help="measure Thunder too, which must be installed")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers there as well")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")


def run(args: Namespace) -> int:
    """Measure, show, write."""
    extra = tuple(name for name in ("inductor", "thunder") if getattr(args, name) or name in (args.who or ()))
    options = core.Options(args.rounds, frozenset(args.who) if args.who else None, extra)
    here = machine()
    with Console(stderr=True).status("measuring") as status:
        found = SUITES[args.suite].run(args.only, options, status.update)
    console = Console()
    console.print(f"{here}; one thread", soft_wrap=True)
    console.print(table(found, f"tessera bench {args.suite}"))
    if args.json:
        args.json.write_text(json.dumps(to_json(args.suite, here, found), indent=2) + "\n")
    return int(args.check and any(row.passed is False for row in found))


COMMAND = Command("measure Tessera against its peers", arguments, run)
