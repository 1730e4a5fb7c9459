"""`tessera tile-opt`: run passes over tile kernels in MLIR text and print what comes out."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tessera.tile.passes.pipeline import PASSES, PIPELINE, optimise
from tessera.tile.text import kernels, parse, to_text
from tessera.tools.command import Command
from tessera.util.errors import TesseraError


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", default="-", help="MLIR text of tile kernels; - is standard input")
    parser.add_argument("--passes", default=",".join(PIPELINE), help="names, joined by commas (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the passes and stop")


def run(args: Namespace) -> int:
    if args.list:
        for name, function in PASSES.items():
            module = sys.modules[function.__module__]
            print(f"{name:14}{(module.__doc__ or '').splitlines()[0]}")
        return 0
    try:
        text, name = _read(args.file)
        module = parse(text, name)
        for kernel in kernels(module):
            optimise(kernel, [p for p in args.passes.split(",") if p])
    except (TesseraError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(to_text(module))
    return 0


def _read(file: str) -> tuple[str, str]:
    return (sys.stdin.read(), "<stdin>") if file == "-" else (Path(file).read_text(), file)


COMMAND = Command("run passes over tile kernels", arguments, run)
