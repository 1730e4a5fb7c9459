"""The command line of `tessera bench`: which suite, how long, against whom, and where the numbers go."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from tessera.tools.bench import core, depth, distributed, formats, fp8, kernels, models, serve, spatial
from tessera.tools.bench import machine as machine_suite
from tessera.tools.bench.probe import CONTESTANTS
from tessera.tools.bench.report import to_json
from tessera.tools.bench.zoo import suite as zoo
from tessera.tools.command import Command, output_file
from tessera.tools.machine import machine
from tessera.util.errors import OptionError

STDOUT = "-"
SUITES = {
    "core": core, "depth": depth, "kernels": kernels, "models": models, "fp8": fp8, "formats": formats, "zoo": zoo,
    "machine": machine_suite, "distributed": distributed, "spatial": spatial, "serve": serve,
}  # fmt: skip


def arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("suite", choices=SUITES, help="what to measure")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these sections of the suite")
    parser.add_argument("--who", nargs="+", choices=CONTESTANTS, help="only these contestants")
    parser.add_argument("--rounds", type=int, help="samples to take; more is steadier")
    parser.add_argument("--inductor", action="store_true", help="core, formats: measure TorchInductor too")
    parser.add_argument("--thunder", action="store_true", help="core, models: measure Thunder too, if it is installed")
    parser.add_argument("--quick", action="store_true", help="kernels, models, fp8: less of everything, a few minutes")
    parser.add_argument("--tiny", action="store_true", help="models, fp8, zoo, formats: CPU sizes")
    parser.add_argument("--best", action="store_true", help="models, zoo: more modes of TorchInductor, the best counts")
    parser.add_argument("--first", action="store_true", help="models: first calls in fresh processes, cold and warm")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="not core: start nothing new after it")
    parser.add_argument("--held-back", action="store_true", help="zoo: only the models that nobody may tune for")
    parser.add_argument("--resume-ours", action="store_true", help="zoo: take Tessera's figures from the file too")
    parser.add_argument("--retry", action="store_true", help="zoo: measure again what failed or took too long")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="zoo: what one measurement may take (300)")
    parser.add_argument("--jobs", type=int, help="zoo: so many compile side by side; they are timed one by one (1)")
    parser.add_argument("--kernels", type=int, metavar="N", help="zoo: name a step's N largest kernels, in the JSON")
    parser.add_argument("--tune", action="store_true", help="kernels: search for fast schedules of our own kernels")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where (CUDA if there is one); not core")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="kernels: threads of a CPU (1 2)")
    parser.add_argument(
        "--json",
        type=output_file,
        nargs="?",
        const=STDOUT,
        metavar="PATH",
        help="give JSON on standard output, or write it there as well; the zoo goes on from that file",
    )
    serve.arguments(parser)
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed or a result is wrong")


def run(args: Namespace) -> int:
    """Measure, show, write."""
    suite, here = SUITES[args.suite], machine()
    if unknown := [name for name in args.only if name not in suite.SECTIONS]:
        raise OptionError(f"--only: unknown {unknown[0]!r}; choose from {', '.join(suite.SECTIONS)}")
    with Console(stderr=True).status("measuring") as status:
        outcome = suite.outcome(args, status.update)
    if args.json:
        text = json.dumps(outcome.document or to_json(args.suite, here, outcome.rows), indent=2) + "\n"
        sys.stdout.write(text) if args.json == STDOUT else Path(args.json).write_text(text)
    if args.json != STDOUT:
        console = Console(width=None if sys.stdout.isatty() else 200)  # a file is as wide as the table
        console.print(f"{here}; {outcome.note}", soft_wrap=True)
        console.print(outcome.table)
    return int(args.check and outcome.missed)


COMMAND = Command(arguments, run)
