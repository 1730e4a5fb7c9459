"""`tessera check script.py`: is every graph that a script compiles right? If not, who is to blame?

The script runs as it is; each compiled graph is checked afterwards on the inputs of its first call, against float64.
`tessera check --battery` needs no script: it tries everything that can be tried on this machine (`tools/battery/`).
"""

from __future__ import annotations

import dataclasses
from argparse import REMAINDER, Action, ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import Progress
from rich.table import Table

from tessera.inspection.check import check_graphs, eager_notes, record_first
from tessera.inspection.graph_check import Fault, GraphCheck
from tessera.pipeline import compilation as pipelines
from tessera.pipeline.compilation import Compilation
from tessera.tools.battery import command as battery
from tessera.tools.command import Command, console, write_json
from tessera.tools.run import check_states, run_chosen, script_arguments
from tessera.tools.session import Session
from tessera.util.config import override

Recorded = dict[Compilation, list[object]]


@contextmanager
def recording() -> Iterator[Recorded]:
    """The inputs of the first call of every graph compiled meanwhile; random numbers are drawn by PyTorch."""
    recorded: Recorded = {}

    def watch(compilation: Compilation) -> None:
        record_first(compilation, recorded)

    pipelines.WATCHERS.append(watch)
    try:
        with override(fused_random="off"):
            yield recorded
    finally:
        pipelines.WATCHERS.remove(watch)


def checked(args: Namespace) -> tuple[Session, list[GraphCheck], list[Fault], list[str]]:
    """Run the script and check what it compiled, one graph after another."""
    with recording() as recorded:
        session = run_chosen(args)
    check_states(session)
    graphs, faults, notes = [], [], [n for state in session.states for n in eager_notes(state)]
    every = [c for state in session.states for c in state.compilations()]
    notes += [f"{c.name} was not checked: it was not called, or is a training step" for c in every if c not in recorded]
    with Progress(console=console(stderr=True), transient=True) as progress:
        for compilation, inputs in progress.track(recorded.items(), description="checking graphs"):
            checks, wrong, said = check_graphs({compilation: inputs})
            graphs, faults, notes = graphs + checks, faults + wrong, notes + said
    return session, graphs, faults, notes


def run(args: Namespace) -> int:
    if args.battery is not None:
        return battery.main(args.battery)
    session, graphs, faults, notes = checked(args)
    facts = {
        "ok": not faults,
        "graphs": {g.compilation.name: [{**dataclasses.asdict(c), "ok": c.ok} for c in g.comparisons] for g in graphs},
        "faults": [dataclasses.asdict(f) for f in faults],
        "notes": notes,
        "exit_code": session.exit_code,
    }
    if not write_json(args, facts):
        _show(graphs, faults, notes)
    return int(bool(faults)) or session.exit_code


def _show(graphs: list[GraphCheck], faults: list[Fault], notes: list[str]) -> None:
    out = console()
    table = Table("graph", "results", "worst error", "its limit", "")
    for g in graphs:
        worst = max(g.comparisons, key=lambda c: c.error / (c.limit or 1e-300), default=None)
        bad = [f for f in faults if f.graph == g.compilation.name]
        shown = (f"{worst.error:.3g}", f"{worst.limit:.3g}") if worst else ("", "")
        table.add_row(g.compilation.name, str(len(g.comparisons)), *shown, "[red]wrong" if bad else "[green]right")
    out.print(table)
    for fault in faults:
        out.print(str(fault), style="red", markup=False)
    for note in notes:
        out.print(f"note: {note}", markup=False)


def arguments(parser: ArgumentParser) -> None:
    of_script = script_arguments(parser)

    class Battery(Action):
        """What follows is the battery's, and no script is needed."""

        def __call__(self, parser: ArgumentParser, namespace: Namespace, values: object, option: object = None) -> None:
            namespace.battery = values
            for argument in of_script:
                argument.required = False

    parser.add_argument(
        "--battery", action=Battery, nargs=REMAINDER, help="check this machine instead of a script; --battery --help"
    )


COMMAND = Command(arguments, run)
