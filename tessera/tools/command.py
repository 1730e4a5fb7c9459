"""The shape of a subcommand: its arguments, and what runs and gives the exit code. Its line of help stands in `cli.py`.

Every command takes `--json`: the same facts for a program, alone on standard output. What a user gets wrong is
raised as a `TesseraError` or `OSError`, which the command line turns into one line and exit code 2.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tessera.util.errors import OptionError
from tessera.util.files import check_writable
from tessera.util.phases import phase

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Command:
    """One entry of the command line."""

    arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


Number = TypeVar("Number", int, float)


def above(least: Number) -> Callable[[str], Number]:
    """A type of an argument: a number, of the kind of the least, that is larger."""

    def read(text: str) -> Number:
        value = type(least)(text)
        if not value > least:
            raise ArgumentTypeError(f"expected more than {least:g}, got {text}")
        return value

    read.__name__ = type(least).__name__
    return read


def output_file(path: str) -> str:
    """A type of an argument: a file that the command writes in the end. That it cannot is said before the work."""
    try:
        check_writable(path)
    except OptionError as error:
        raise ArgumentTypeError(str(error)) from error
    return path


def json_argument(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="give JSON on standard output, and nothing else there")


def write_json(args: Namespace, data: object) -> bool:
    """Print the facts as JSON where that was asked for; is there nothing left to print?"""
    if args.json:
        sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")
    return args.json


def chosen_device(args: Namespace, otherwise: str = "try --device cpu") -> str:
    """The device that `--device` names, or the best there is."""
    import torch  # commands that compute nothing do without

    with phase("device"):
        there = torch.cuda.is_available()
    device = args.device or ("cuda" if there else "cpu")
    if device == "cuda" and not there:
        raise OptionError(f"expected a CUDA device, got none; {otherwise}")
    return device


def console(stderr: bool = False) -> Console:
    """A terminal as wide as it is; a file is as wide as what is written to it."""
    from rich.console import Console  # commands that print plain text do without

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 200)
