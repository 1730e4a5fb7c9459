"""`tessera profile script.py`: run a script, then measure the programs that it compiled, each as it was last called."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from tessera.tools.command import Command, console, output_file, write_json
from tessera.tools.profile.calls import Calls
from tessera.tools.profile.instrument import labelled
from tessera.tools.profile.result import GROUPS, Profile
from tessera.tools.profile.run import measure
from tessera.tools.run import check_states, run_chosen, script_arguments
from tessera.tools.session import Session
from tessera.util.errors import InputError


def step_arguments(parser: ArgumentParser, steps: int) -> None:
    parser.add_argument("--steps", type=int, default=steps, help="how many are measured (default: %(default)s)")
    parser.add_argument("--no-backward", action="store_true", help="measure forward programs only")


def arguments(parser: ArgumentParser) -> None:
    step_arguments(parser, 10)
    parser.add_argument(
        "--by", choices=GROUPS, default="equation", help="what rows are summed by (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, default=30, help="rows that are shown (default: %(default)s)")
    parser.add_argument(
        "--chrome",
        type=output_file,
        metavar="FILE",
        help="write a step as trace events, for Perfetto or chrome://tracing",
    )
    script_arguments(parser)


def profiled(args: Namespace) -> tuple[Session, Profile]:
    """Run the script and measure what it compiled."""
    calls = Calls()
    with calls.watching():
        session = run_chosen(args)
    check_states(session)
    if not calls.last:
        raise InputError(f"{session.script} called nothing that was compiled; `tessera explain` says why")
    named = labelled([c for state in session.states for c in state.compilations()])
    called = [(c, label) for c, label in named if c in calls.last]
    return session, measure(lambda: calls.step(not args.no_backward), called, args.steps)


def run(args: Namespace) -> int:
    session, profile = profiled(args)
    if args.chrome:
        profile.save_chrome(args.chrome)
    if not write_json(args, profile.to_dict()):
        console().print(profile.table(args.limit, args.by))
    return session.exit_code


COMMAND = Command(arguments, run)
