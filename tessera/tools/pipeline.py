"""`tessera pipeline`: the stages of a compilation, when each applies, and why it stands where it does."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from tessera.executors.base import in_order
from tessera.executors.default import AUTO, named
from tessera.pipeline.lists import PIPELINES
from tessera.pipeline.stage import expanded
from tessera.pipeline.table import table
from tessera.tools.command import Command, json_argument, write_json
from tessera.training import program  # noqa: F401  (its pipelines are in the table too)


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=sorted(PIPELINES), default="training", help="of which compilation")
    parser.add_argument("--executors", default=AUTO, help="with the passes of these executors, such as tile,aten")
    json_argument(parser)


def run(args: Namespace) -> int:
    executors = named(args.executors)
    stages = expanded(PIPELINES[args.kind], in_order(executors))
    if not write_json(args, [{"stage": s.title, "needs": list(s.needs), "why": s.why} for s in stages]):
        print(table(args.kind, executors))
    return 0


COMMAND = Command(arguments, run)
