"""The `tessera` command. A subcommand is one line in `COMMANDS`; the rest of it stands in its own file, which is
imported when that command is asked for: what serves a compiled model does not wait for the compiler.
"""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence

import tessera
from tessera.tools.command import Command
from tessera.util.errors import TesseraError

COMMANDS = {  # module of tessera.tools, and where it has another name than COMMAND, what it is called there
    "run": "run",
    "generate": "generate",
    "serve": "serve",
    "top": "top",
    "explain": "explain",
    "trace": "trace",
    "pipeline": "pipeline",
    "check": "check",
    "repro": "repro",
    "profile": "profile.command",
    "report": "report.command",
    "op": "op",
    "convert": "convert",
    "inspect": "artifacts:INSPECT",
    "verify": "artifacts:VERIFY",
    "sign": "artifacts:SIGN",
    "keys": "artifacts:KEYS",
    "machine": "machines",
    "map": "map",
    "simulate": "simulate",
    "codesign": "codesign",
    "cache": "cache",
    "tile-opt": "tile_opt",
    "bench": "bench.command",
    "doctor": "doctor",
}


def command(name: str) -> Command:
    module, _, attribute = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(f"tessera.tools.{module}"), attribute or "COMMAND")


def parser(names: Iterable[str] = COMMANDS) -> ArgumentParser:
    """The command line of these commands, one subparser each."""
    root = ArgumentParser(prog="tessera", description="A source-to-source compiler for PyTorch.")
    root.add_argument("--version", action="version", version=f"tessera {tessera.__version__}")
    subparsers = root.add_subparsers(dest="command", required=True, metavar="command")
    for name in names:
        one = command(name)
        one.arguments(subparsers.add_parser(name, help=one.help, description=one.help))
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code is ours. What the user got wrong is one line and exit code 2."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser(given[:1] if given and given[0] in COMMANDS else COMMANDS).parse_args(given)
    try:
        return command(args.command).run(args)
    except (TesseraError, OSError) as error:
        print(f"tessera {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
