"""`tessera simulate FILE`: a program for a spatial machine run on data, to the cycle, or refused.

In: a `.spatial` file, and its inputs: random ones (`--random`), or a file that `torch.save` wrote a list of tensors to.
Out: cycles, bytes and energy. A violation is one error and exit code 1.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from tessera.spatial.listing import ChainedProgram, Program, load
from tessera.spatial.listing.types import TensorType
from tessera.spatial.simulator.api import cost, simulate
from tessera.spatial.simulator.judge import judge
from tessera.spatial.simulator.timeline import events
from tessera.spatial.simulator.violation import Violation
from tessera.tools.command import Command, json_argument, output_file, write_json
from tessera.util.errors import OptionError


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", help="a .spatial file")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--random", action="store_true", help="run it on random inputs")
    data.add_argument("--inputs", metavar="FILE", help="run it on tensors that torch.save wrote as a list")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument("--jitter", type=int, metavar="SEED", help="let what travels arrive anywhere in its window")
    parser.add_argument("--runs", type=int, default=1, help="how many; inputs then have a first dimension of so many")
    parser.add_argument("--perfetto", type=output_file, metavar="FILE", help="write what is busy when, for Perfetto")
    json_argument(parser)


def run(args: Namespace) -> int:
    program = load(args.file)
    if args.perfetto and isinstance(program, ChainedProgram):
        raise OptionError("--perfetto: expected a listing, got a chain of blocks")
    try:
        if args.random or args.inputs:
            inputs = _given(args.inputs) if args.inputs else random_inputs(input_types(program), args.seed, args.runs)
            report = simulate(program, *inputs, jitter=args.jitter, runs=args.runs).report
        else:
            report = cost(program, args.jitter)
        if args.perfetto and isinstance(program, Program):
            judged = judge(program.listing, program.machine, args.jitter)
            Path(args.perfetto).write_text(json.dumps({"traceEvents": list(events(judged))}), encoding="utf-8")
    except Violation as violation:
        print(f"tessera simulate: {args.file}: {violation}", file=sys.stderr)
        return 1
    if not write_json(args, report.data()):
        print(report)
    return 0


def input_types(program: Program | ChainedProgram) -> list[TensorType]:
    if isinstance(program, Program):
        return [of for _, of in program.listing.inputs]
    types = {name: of for listing in program.chain.parts.values() for name, of in listing.inputs}
    return [types.get(name, TensorType("bool", (1,))) for name in program.chain.inputs]  # what nobody reads is anything


def _given(path: str) -> list[torch.Tensor]:
    try:
        tensors = torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # the reader fails in its own ways on what nobody saved
        raise OptionError(f"{path}: expected what torch.save wrote: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(tensors, list | tuple) or not all(isinstance(x, torch.Tensor) for x in tensors):
        raise OptionError(f"{path}: expected a list of tensors")
    return list(tensors)


def random_inputs(types: list[TensorType], seed: int, runs: int = 1) -> list[torch.Tensor]:
    """Normal numbers, or integers of -8 to 7; indices are 0, which is inside of every table."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for of in types:
        dtype, shape = getattr(torch, of.dtype), of.shape if runs == 1 else (runs, *of.shape)
        if dtype.is_floating_point:
            inputs.append(torch.randn(shape, generator=generator).to(dtype))
        elif of.dtype == "int8":
            inputs.append(torch.randint(-8, 8, shape, generator=generator).to(dtype))
        else:
            inputs.append(torch.zeros(shape, dtype=dtype))
    return inputs


COMMAND = Command(arguments, run)
