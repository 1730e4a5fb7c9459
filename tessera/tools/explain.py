"""`tessera explain script.py`: run a script and tell what compiling did, with the user's own lines."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from tessera.inspection.explain import explain_states
from tessera.tools.command import Command, console, write_json
from tessera.tools.run import check_states, run_chosen, script_arguments
from tessera.tools.summary import Summary


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--no-measure", action="store_true", help="predict memory only; do not run programs again")
    script_arguments(parser)


def run(args: Namespace) -> int:
    session = run_chosen(args)
    check_states(session)
    explanation = explain_states(session.states, measure=not args.no_measure)
    summary = Summary.of(session, explanation)
    if not write_json(args, {**explanation.to_dict(), "summary": summary.to_dict()}):
        out = console()
        out.print(explanation)
        out.print(summary.table())
    return session.exit_code


COMMAND = Command("run a script and explain graphs, breaks, recompiles, fusion and memory", arguments, run)
