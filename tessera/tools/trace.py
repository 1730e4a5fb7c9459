"""`tessera trace script.py[:function]`: the programs of what a script compiled, printed or saved."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.syntax import Syntax
from rich.table import Table

from tessera.inspection.programs import Stage
from tessera.tools.command import Command, console, output_file, write_json
from tessera.tools.run import check_states, run_chosen, script_arguments
from tessera.util.errors import OptionError


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--stage", default="captured", help="which stage (default: captured; --list names them)")
    parser.add_argument("--list", action="store_true", help="list graphs and stages instead of printing one")
    parser.add_argument(
        "-o", "--output", type=output_file, metavar="FILE", help="save the program as Python that runs by itself"
    )
    script, _ = script_arguments(parser)
    script.help = "a Python script, or script.py:function for the graphs of one function"


def run(args: Namespace) -> int:
    script, function = split(args.script)
    session = run_chosen(args, script)
    check_states(session)
    stages = [
        Stage(c.name, name, trace)
        for state in session.states
        for c in state.compilations()
        if _named(c.name, function)
        for name, trace in c.account.stages
    ]
    if not stages:
        graphs = sorted({c.name for state in session.states for c in state.compilations()})
        raise OptionError(f"no graph of {function!r}; there are {', '.join(graphs) or 'none'}")
    return _list(args, stages) if args.list else _show(args, stages)


def split(script: str) -> tuple[str, str]:
    """`file.py:function` names both; a bare file means every function."""
    file, colon, function = script.rpartition(":")
    return (file, function) if colon and file else (script, "")


def _named(graph: str, function: str) -> bool:
    return not function or graph == function or graph.rpartition("_")[0] == function


def _list(args: Namespace, stages: list[Stage]) -> int:
    if not write_json(args, [{"graph": s.graph, "stage": s.name, "equations": len(s.trace.equations)} for s in stages]):
        table = Table("graph", "stage", "equations")
        for s in stages:
            table.add_row(s.graph, s.name, str(len(s.trace.equations)))
        console().print(table)
    return 0


def _show(args: Namespace, stages: list[Stage]) -> int:
    chosen = [s for s in stages if s.name == args.stage]
    if not chosen:
        names = dict.fromkeys(s.name for s in stages)
        raise OptionError(f"--stage: expected one of {', '.join(names)}, got {args.stage!r}")
    if args.output:
        chosen[-1].save(args.output)
        console(stderr=True).print(f"saved {chosen[-1].graph}: {chosen[-1].name} to {args.output}")
    elif not write_json(args, [{"graph": s.graph, "stage": s.name, "program": str(s.trace)} for s in chosen]):
        for s in chosen:
            console().print(Syntax(str(s), "python", background_color="default", word_wrap=False))
    return 0


COMMAND = Command(arguments, run)
