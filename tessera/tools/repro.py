"""`tessera repro script.py`: run a script, find the first graph that fails, and write a small script that shows it.

A graph fails if it could not be compiled, or if it computes something wrong on the inputs of its first call.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console

from tessera.inspection.case import Case, of_compilation, of_failure
from tessera.inspection.minimise import minimise
from tessera.inspection.reproduce import write
from tessera.just_in_time.backend import Backend
from tessera.tools.check import checked
from tessera.tools.command import Command, output_file, write_json
from tessera.tools.run import script_arguments
from tessera.util.errors import OptionError


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=output_file, default="repro.py", metavar="FILE", help="where to (default: repro.py)"
    )
    parser.add_argument("--no-minimise", action="store_true", help="keep the whole graph")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to make it smaller (default: 120)")
    script_arguments(parser)


def run(args: Namespace) -> int:
    case, graphs = _find(args)
    if case is None:
        facts = {"path": None, "outcome": "", "graphs": graphs}
        if not write_json(args, facts):
            right = "graph compiles and is right" if graphs == 1 else "graphs compile and are right"
            print(f"nothing fails in {args.script}: {graphs} {right}; nothing was written")
        return 0
    outcome, whole = case.outcome(), len(case.trace.equations)
    if not outcome:
        raise OptionError("a graph fails in the script, but not by itself on made-up inputs; run tessera check instead")
    if not args.no_minimise:
        with Console(stderr=True).status(f"{whole} equations") as status:
            case = minimise(case, args.seconds, lambda left: status.update(f"{left} of {whole} equations"))
    write(case, args.output, outcome)
    facts = {"path": args.output, "outcome": outcome, "equations": len(case.trace.equations), "of": whole}
    if not write_json(args, facts):
        print(f"wrote {args.output}: {outcome}, {facts['equations']} of {whole} equations; run it with python")
    return 0


def _find(args: Namespace) -> tuple[Case | None, int]:
    """The first failure of a script, if there is one, and how many graphs were looked at."""
    session, graphs, faults, _ = checked(args)
    for state in session.states:
        for record in state.backend.graphs if isinstance(state.backend, Backend) else ():
            if record.failure is not None:
                return of_failure(record.failure), len(graphs)
    wrong = {fault.graph for fault in faults}
    for graph in graphs:
        if graph.compilation.name in wrong:
            return of_compilation(graph.compilation, graph.inputs), len(graphs)
    return None, len(graphs)


COMMAND = Command(arguments, run)
