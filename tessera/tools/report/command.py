"""`tessera report -o report.html script.py`: run a script and write the report of everything it compiled."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

from tessera.tools.command import Command, console, output_file, write_json
from tessera.tools.profile.command import profiled, step_arguments
from tessera.tools.report.write import write
from tessera.tools.run import check_states, run_chosen, script_arguments


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=output_file, metavar="FILE", default="report.html", help="default: %(default)s"
    )
    parser.add_argument("--no-measure", action="store_true", help="show what was compiled; run nothing again")
    step_arguments(parser, 5)
    script_arguments(parser)


def run(args: Namespace) -> int:
    if args.no_measure:
        session, profile = run_chosen(args), None
        check_states(session)
    else:
        session, profile = profiled(args)
    write(args.output, session.states, profile, os.path.basename(session.script))
    facts = {"report": os.path.abspath(args.output), "bytes": os.path.getsize(args.output)}
    if not write_json(args, facts):
        console(stderr=True).print(f"wrote {args.output}, {facts['bytes'] / 1e6:.1f} MB")
    return session.exit_code


COMMAND = Command(arguments, run)
