"""The `tessera` command. A subcommand is one line in `COMMANDS`; the rest of it stands in its own file."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

import tessera
from tessera.tools import (
    artifacts,
    bench,
    cache,
    check,
    codesign,
    convert,
    doctor,
    explain,
    generate,
    machines,
    map,
    op,
    pipeline,
    repro,
    run,
    serve,
    simulate,
    tile_opt,
    top,
    trace,
)
from tessera.tools.command import Command
from tessera.tools.profile import command as profile_command
from tessera.tools.report import command as report_command
from tessera.util.errors import TesseraError

COMMANDS: dict[str, Command] = {
    "run": run.COMMAND,
    "generate": generate.COMMAND,
    "serve": serve.COMMAND,
    "top": top.COMMAND,
    "explain": explain.COMMAND,
    "trace": trace.COMMAND,
    "pipeline": pipeline.COMMAND,
    "check": check.COMMAND,
    "repro": repro.COMMAND,
    "profile": profile_command.COMMAND,
    "report": report_command.COMMAND,
    "op": op.COMMAND,
    "convert": convert.COMMAND,
    "inspect": artifacts.INSPECT,
    "verify": artifacts.VERIFY,
    "sign": artifacts.SIGN,
    "keys": artifacts.KEYS,
    "machine": machines.COMMAND,
    "map": map.COMMAND,
    "simulate": simulate.COMMAND,
    "codesign": codesign.COMMAND,
    "cache": cache.COMMAND,
    "tile-opt": tile_opt.COMMAND,
    "bench": bench.COMMAND,
    "doctor": doctor.COMMAND,
}


def parser() -> ArgumentParser:
    """The whole command line, one subparser a command."""
    root = ArgumentParser(prog="tessera", description="A source-to-source compiler for PyTorch.")
    root.add_argument("--version", action="version", version=f"tessera {tessera.__version__}")
    subparsers = root.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        command.arguments(subparsers.add_parser(name, help=command.help, description=command.help))
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code is ours. What the user got wrong is one line and exit code 2."""
    args = parser().parse_args(argv)
    try:
        return COMMANDS[args.command].run(args)
    except (TesseraError, OSError) as error:
        print(f"tessera {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
