"""The `tessera` command. A subcommand is one line in `COMMANDS`; the rest of it stands in its own file."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

import tessera
from tessera.tools import bench, doctor, tile_opt
from tessera.tools.command import Command

COMMANDS: dict[str, Command] = {
    "bench": bench.COMMAND,
    "doctor": doctor.COMMAND,
    "tile-opt": tile_opt.COMMAND,
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
    """Run one command; its exit code is ours."""
    args = parser().parse_args(argv)
    return COMMANDS[args.command].run(args)


if __name__ == "__main__":
    sys.exit(main())
