"""What `tessera run` takes behind a file that is no script: where inputs come from, sizes, whom to compare with."""

from __future__ import annotations

import sys
import zipfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

import numpy as np

from tessera.util.errors import OptionError

EAGER = "eager"


def parsed(kind: str, arguments: list[str], others: str) -> Namespace:
    parser = ArgumentParser(prog=f"tessera run model{kind}")
    parser.add_argument("--random", action="store_true", help="make inputs of the types that the file says")
    parser.add_argument("--inputs", help="an .npz file with an array for each input")
    parser.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="a size that the file leaves open"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", metavar="WITH", help=others)
    if kind == ".tess":
        parser.add_argument("--entry", help="which of the file's functions, where there are several")
    try:
        return parser.parse_args(arguments)
    except SystemExit as end:
        if not end.code:  # --help was asked for
            raise
        print(parser.format_usage(), file=sys.stderr)
        raise OptionError("expected the options above behind the file") from None


def sizes(texts: list[str]) -> dict[str, int]:
    """`["batch=3"]` as numbers by name."""
    named = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not number.isdigit():
            raise OptionError(f"--size: expected NAME=N, got {text!r}")
        named[name] = int(number)
    return named


def arrays(path: str, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file that inputs are called after."""
    try:
        held = np.load(path, allow_pickle=False)
        there = (
            {name: held[name] for name in wanted if name in held} if isinstance(held, np.lib.npyio.NpzFile) else None
        )
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise OptionError(f"--inputs: {path} is no .npz file of plain arrays: {error}") from error
    if there is None:
        raise OptionError(f"--inputs: {path} is one array: expected an .npz file with an array for each input")
    if missing := [name for name in wanted if name not in there]:
        raise OptionError(f"--inputs: expected an array called {missing[0]!r}; there are {', '.join(held) or 'none'}")
    return there
