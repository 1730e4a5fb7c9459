"""The shape of a subcommand: a line of help, its arguments, and what runs and gives the exit code.

Every command takes `--json`: the same facts for a program, on standard output or in a file. What a user gets wrong is
raised as a `TesseraError` or `OSError`, which the command line turns into one line and exit code 2.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

STDOUT = "-"


@dataclass(frozen=True)
class Command:
    """One entry of the command line."""

    help: str
    arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def json_argument(parser: ArgumentParser) -> None:
    """`--json` prints JSON in place of tables; `--json=PATH` writes it there."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="PATH",
        help="give JSON, on standard output or in a file (--json=PATH)",
    )


def write_json(args: Namespace, data: object) -> bool:
    """Write the facts where `--json` asked for them; is there nothing left to print?"""
    if args.json is None:
        return False
    text = json.dumps(data, indent=2, default=str) + "\n"
    if args.json == STDOUT:
        sys.stdout.write(text)
        return True
    Path(args.json).write_text(text)
    return False


def console(stderr: bool = False) -> Console:
    """A terminal as wide as it is; a file is as wide as what is written to it."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 200)
