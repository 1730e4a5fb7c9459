"""The `tessera` command. A subcommand is one line in `COMMANDS`; the rest of it stands in its own file, which is
imported when that command is asked for: what serves a compiled model does not wait for the compiler, nor does help.
"""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

import tessera
from tessera.tools.command import Command
from tessera.util import bytecode
from tessera.util.errors import TesseraError
from tessera.util.garbage import collection_paused, freeze
from tessera.util.phases import phase

COMMANDS = {  # a line of help, and where it stands in tessera.tools: a module, and COMMAND where no other name is said
    "run": (
        "run a script with every torch.compile and tessera.jit in it going through Tessera, or an .onnx or .tess file",
        "run",
    ),
    "generate": ("what a model goes on to say, written as it comes", "generate"),
    "serve": ("a model behind OpenAI's endpoints", "serve"),
    "top": ("what a server does now", "top"),
    "explain": ("run a script and explain graphs, breaks, recompiles, fusion, memory and the floor", "explain"),
    "trace": ("print or save the program of a stage of what a script compiled", "trace"),
    "pipeline": ("the stages of a compilation, as the compiler has them", "pipeline"),
    "check": ("check what a script compiles against float64, and name what is wrong", "check"),
    "repro": ("write a small script that shows the first failure of a script", "repro"),
    "profile": ("run a script and measure every equation of what it compiled, against the roofline", "profile.command"),
    "report": ("run a script and write an HTML report of everything it compiled", "report.command"),
    "op": ("where each rule of an operator stands", "op"),
    "convert": ("turn a model from a file into an artifact or an ONNX file", "convert"),
    "inspect": ("show what an artifact holds", "artifacts:INSPECT"),
    "verify": ("check an artifact's hashes and signatures", "artifacts:VERIFY"),
    "sign": ("sign an artifact", "artifacts:SIGN"),
    "keys": ("your key, and the keys whose artifacts you trust", "artifacts:KEYS"),
    "machine": ("a machine's numbers and their sources", "machines"),
    "map": ("compile a model for every core of a spatial machine", "map"),
    "simulate": ("run a program for a spatial machine, to the cycle", "simulate"),
    "codesign": ("say what to change in a spatial machine for a model", "codesign"),
    "cache": ("list, measure or clear the kernels and schedules kept on disk", "cache"),
    "tile-opt": ("run passes over tile kernels, or the kernels themselves", "tile_opt"),
    "bench": ("measure Tessera against its peers", "bench.command"),
    "doctor": ("check the installation and the machine", "doctor"),
}


def command(name: str) -> Command:
    module, _, attribute = COMMANDS[name][1].partition(":")
    with phase("imports"):
        return getattr(importlib.import_module(f"tessera.tools.{module}"), attribute or "COMMAND")


def parser(asked: str | None = None) -> ArgumentParser:
    """The command line. It knows the arguments of the command that is asked for; the others are named alone."""
    root = ArgumentParser(prog="tessera", description="A source-to-source compiler for PyTorch.")
    root.add_argument("--version", action="version", version=f"tessera {tessera.__version__}")
    subparsers = root.add_subparsers(dest="command", required=True, metavar="command")
    for name, (text, _) in COMMANDS.items():
        one = subparsers.add_parser(name, help=text, description=text)
        if name == asked:
            command(name).arguments(one)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code is ours. What the user got wrong is one line and exit code 2."""
    given = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        bytecode.keep()
    with collection_paused():
        args = parser(given[0] if given else None).parse_args(given)
    if argv is None:  # the process is this command's, and what it has imported stays
        freeze()
    try:
        return command(args.command).run(args)
    except (TesseraError, OSError) as error:
        print(f"tessera {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
