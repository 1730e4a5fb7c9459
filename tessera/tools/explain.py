"""`tessera explain script.py`: run a script and tell what compiling did, with the user's own lines."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from tessera.inspection.explain import explain_states
from tessera.inspection.floor import Floor
from tessera.tools.command import Command, console, write_json
from tessera.tools.profile.command import profiled, step_arguments
from tessera.tools.run import check_states, run_chosen, script_arguments
from tessera.tools.session import Session
from tessera.tools.summary import Summary


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--no-measure", action="store_true", help="predict memory only; do not run programs again")
    parser.add_argument(
        "--floor", action="store_true", help="measure the programs too, and tell where their time is lost, by line"
    )
    step_arguments(parser, 10)
    script_arguments(parser)


def _run(args: Namespace) -> tuple[Session, Floor | None]:
    if args.floor:
        session, profile = profiled(args)
        return session, profile.floor
    session = run_chosen(args)
    check_states(session)
    return session, None


def run(args: Namespace) -> int:
    session, floor = _run(args)
    explanation = explain_states(session.states, measure=not args.no_measure, floor=floor)
    summary = Summary.of(session, explanation)
    if not write_json(args, {**explanation.to_dict(), "summary": summary.to_dict()}):
        out = console()
        out.print(explanation)
        out.print(summary.table())
    return session.exit_code


COMMAND = Command(arguments, run)
