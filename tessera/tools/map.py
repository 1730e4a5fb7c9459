"""`tessera map`: a model as a program for every core of a spatial machine.

In: a model from a file, as `tessera convert` takes it, and a machine. Out: a `.spatial` file, or the listing on
standard output.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tessera.spatial.chain.api import ChainProgram
from tessera.spatial.map import AIMS, BEST, EFFORTS, map_onto
from tessera.spatial.watch.metrics import metrics
from tessera.tools import spatial_report, spatial_source
from tessera.tools.command import Command, json_argument, output_file, write_json
from tessera.util.errors import OptionError


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", help=spatial_source.HELP)
    parser.add_argument("--machine", default="toy", help="its name, or a TOML file")
    parser.add_argument("--chips", type=int, default=1, help="how many to use")
    parser.add_argument("--cut", action="append", default=[], metavar="WORD=COUNT", help="tensor=2; many; or best")
    parser.add_argument("--aim", choices=AIMS, default="latency", help="short runs, or runs that overlap")
    parser.add_argument("--effort", choices=EFFORTS, default="normal", help="how many mappings are tried")
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    parser.add_argument(
        "--output", type=output_file, metavar="FILE", help="write a .spatial file instead of the listing"
    )
    parser.add_argument(
        "--metrics", type=output_file, metavar="FILE", help="write what is used: JSON, or Prometheus text (.prom)"
    )
    parser.add_argument(
        "--report", type=output_file, metavar="FILE", help="write an HTML page, and a trace for Perfetto beside it"
    )
    json_argument(parser)


def run(args: Namespace) -> int:
    model, example, named = spatial_source.read(args.source)
    program = map_onto(
        model, *example, machine=args.machine, chips=args.chips, cut=_cut(args.cut), aim=args.aim, effort=args.effort,
        seed=args.seed, **named,
    )  # fmt: skip
    if isinstance(program, ChainProgram) and (args.metrics or args.report):
        raise OptionError("--metrics and --report: expected a model that is mapped whole, got a chain of blocks")
    if args.output:
        program.save(args.output)
    if args.metrics:
        seen = metrics(program)
        text = seen.prometheus() if args.metrics.endswith(".prom") else json.dumps(seen.data(), indent=2) + "\n"
        Path(args.metrics).write_text(text, encoding="utf-8")
    if args.report:
        spatial_report.write(program, args.report)
    facts = {"cycles": program.cycles, "bound": program.bound, "limit": program.limit}
    facts |= {"interval": program.interval, "summary": program.summary()}
    if not write_json(args, facts):
        print(f"{args.output}: {program.summary()}" if args.output else program)
    return 0


def _cut(given: list[str]) -> dict[str, int] | str | None:
    if given == [BEST]:
        return BEST
    words = [text.partition("=") for text in given]
    if wrong := [text for text, (_, _, count) in zip(given, words, strict=True) if not count.isdecimal()]:
        raise OptionError(f"--cut: expected WORD=COUNT, such as tensor=2, or {BEST} alone; got {wrong[0]!r}")
    return {word: int(count) for word, _, count in words} or None


COMMAND = Command(arguments, run)
