"""`tessera tile-opt`: run passes over tile kernels in MLIR text and print what comes out, or what they compute.

With `--run` each kernel is run by the reference interpreter: float buffers hold random numbers, integer ones zeros
(valid indices), each as long as the kernel's own accesses reach; symbols get the values of `--sizes`, or 8.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from rich.table import Table

from tessera.inspection.examples import example
from tessera.tile.dialect import interp
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.ops import KernelOp, StoreOp
from tessera.tile.dialect.text import kernels, parse, to_text
from tessera.tile.rewrites.pipeline import PASSES, PIPELINE, optimise
from tessera.tools.command import Command, console, json_argument, write_json
from tessera.util.errors import InputError, OptionError


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", default="-", help="MLIR text of tile kernels; - is standard input")
    parser.add_argument("--passes", default=",".join(PIPELINE), help="names, joined by commas (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the passes and stop")
    parser.add_argument("--run", action="store_true", help="run the kernels on random inputs instead of printing them")
    parser.add_argument("--sizes", default="", help="values of symbols for --run, such as s0=4,s1=16 (default: 8 each)")
    json_argument(parser)


def run(args: Namespace) -> int:
    if args.list:
        return _list(args)
    name = "<stdin>" if args.file == "-" else args.file
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: expected MLIR text, got bytes that are no UTF-8 (at {error.start})") from error
    module = parse(text, name)
    for kernel in kernels(module):
        optimise(kernel, [p for p in args.passes.split(",") if p])
    if args.run:
        return _run(args, kernels(module))
    if not write_json(args, {"text": to_text(module), "kernels": [k.sym_name.data for k in kernels(module)]}):
        print(to_text(module))
    return 0


def _list(args: Namespace) -> int:
    titles = {
        name: (sys.modules[function.__module__].__doc__ or "").splitlines()[0] for name, function in PASSES.items()
    }
    if not write_json(args, titles):
        for name, line in titles.items():
            print(f"{name:14}{line}")
    return 0


def _run(args: Namespace, ops: list[KernelOp]) -> int:
    sizes = _sizes(args.sizes)
    known = {s.data for kernel in ops for s in kernel.symbol_names}
    if unknown := sorted(sizes.keys() - known):
        listed = ", ".join(sorted(known)) or "none"
        raise OptionError(f"--sizes: no symbol {unknown[0]!r} in the kernels; there are {listed}")
    rows = [row for kernel in ops for row in _results(kernel, sizes)]
    if not write_json(args, rows):
        table = Table("kernel", "buffer", "dtype", "elements", "first", "mean")
        for row in rows:
            first = ", ".join(f"{x:.4g}" for x in row["first"])
            table.add_row(row["kernel"], row["buffer"], row["dtype"], str(row["elements"]), first, f"{row['mean']:.6g}")
        console().print(table)
    return 0


def _sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if not number.isdigit():
            raise OptionError(f"--sizes: expected something like s0=4,s1=16, got {text!r}")
        sizes[name] = int(number)
    return sizes


def _results(kernel: KernelOp, sizes: dict[str, int]) -> list[dict]:
    """What the kernel leaves in the buffers it stores to."""
    symbols = [sizes.get(s.data, 8) for s in kernel.symbol_names]
    tensors = [
        example([extent], dtype=torch_dtype(b.type.element), seed=i)  # type: ignore[union-attr]
        for i, (b, extent) in enumerate(zip(kernel.buffers, interp.reach(kernel, symbols), strict=True))
    ]
    interp.run(kernel, tensors, symbols)
    stored = {id(op.buffer) for op in kernel.block.ops if isinstance(op, StoreOp)}
    return [
        {
            "kernel": kernel.sym_name.data,
            "buffer": b.name_hint or str(i),
            "dtype": str(t.dtype).removeprefix("torch."),
            "elements": t.numel(),
            "first": t.reshape(-1)[:4].to(torch.float64).tolist(),
            "mean": t.to(torch.float64).mean().item() if t.numel() else 0.0,
        }
        for i, (b, t) in enumerate(zip(kernel.buffers, tensors, strict=True))
        if id(b) in stored
    ]


COMMAND = Command(arguments, run)
