"""`tessera run script.py`: the user's script, compiled by Tessera, and a summary at its end; or a model from a file."""

from __future__ import annotations

import argparse
import importlib
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

from tessera.inspection.explain import explain_states
from tessera.pipeline.options import Options
from tessera.tools.command import Command, console, json_argument, write_json
from tessera.tools.session import Session, run_script
from tessera.tools.summary import Summary
from tessera.util.config import config, override
from tessera.util.errors import OptionError

FILES = {".onnx": "tessera.tools.run_model", ".tess": "tessera.tools.run_artifact"}  # what runs them


def script_arguments(parser: ArgumentParser) -> tuple[Action, Action]:
    """What every command that runs a script takes. What stands after the script is the script's own. Gives back
    both arguments."""
    parser.add_argument("--executors", help="who may run what, such as sdpa,tile,aten, where the script does not say")
    json_argument(parser)
    script = parser.add_argument("script", help="a Python script")
    arguments = parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return script, arguments


@contextmanager
def chosen(args: Namespace) -> Iterator[None]:
    with override(executors=args.executors or config.executors):
        Options.of(None, None, None)  # an unknown name is refused before the script runs
        yield


def run_chosen(args: Namespace, script: str | None = None) -> Session:
    """The script's session under the command's options."""
    quiet = redirect_stdout(sys.stderr) if args.json else nullcontext()  # JSON has standard output to itself
    with chosen(args), quiet:
        return run_script(script or args.script, args.args)


def run(args: Namespace) -> int:
    kind = args.script[args.script.rfind(".") :]
    if kind in FILES:
        return _run_model(args, FILES[kind])
    session = run_chosen(args)
    summary = Summary.of(session, explain_states(session.states))
    if not write_json(args, summary.to_dict()):
        console(stderr=True).print(summary.table())
    return session.exit_code


def _run_model(args: Namespace, home: str) -> int:
    # ONNX is an extra: scripts and artifacts run without it.
    own = [x for x in args.args if x != "--json"]  # a model has no options of its own: these are ours, wherever
    args.json |= own != args.args
    facts, code = importlib.import_module(home).run_model(args.script, own)
    if not write_json(args, facts):
        for name, shape in facts["outputs"].items():
            console().print(f"{name}: {shape}", markup=False)
        lines = [*facts.get("differences", ()), *([f"first: {facts['first']}"] if "first" in facts else ())]
        for line in lines:
            console().print(line, soft_wrap=True, markup=False)
    return code


def check_states(session: Session) -> None:
    if not session.states:
        raise OptionError(f"{session.script} compiled nothing: it calls neither torch.compile nor tessera.jit")


COMMAND = Command(script_arguments, run)
