"""Runs random programs through the tile compiler and says which are wrong: `python run_regions.py MODE START COUNT`.

The modes: `cpu` is the executor as it stands; `whole` makes one CPU kernel of the whole program where that is possible;
`dynamic` runs programs of symbolic sizes on the CPU, at two sizes; `interp` is the reference interpreter; `triton` is
Triton's interpreter on CPU tensors (TRITON_INTERPRET=1 must be set before Python starts); `cutile` is the CUDA Tile
target, run by the model of cuTile. `whole`, `triton` and `cutile` take any of the proposed schedules. The last line of
output is a `Report` as JSON, so that a test can run a mode in a process of its own.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import cutile_model
from on_h200 import CUDA_TILE as TARGET
from programs import trace_of
from regions import DYNAMIC, Program, make, wrong
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tessera.executors import tile
from tessera.executors.aten import bind
from tessera.executors.base import FusionExecutor
from tessera.executors.claim import claim
from tessera.executors.regions import body_of
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation
from tessera.ir.printer import compile_trace
from tessera.ir.record import record
from tessera.ir.trace import Trace
from tessera.ir.verify import verify
from tessera.ops.op import keep_whole
from tessera.passes.clean.dce import dce
from tessera.passes.decompose.apply import decompose
from tessera.passes.fuse import regions as fuse
from tessera.passes.fuse.compiler import VIEW
from tessera.passes.fuse.duplicate import duplicate
from tessera.passes.fuse.recompute import recompute
from tessera.tile.dialect import interp
from tessera.tile.dialect.ops import ApplyOp, KernelOp
from tessera.tile.from_trace.lower.rule import rule_of
from tessera.tile.from_trace.region import Unlowerable, kind_of, lower, why_not
from tessera.tile.rewrites.split_reduction import can_split
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets import Target, named


@dataclass
class Report:
    """What became of the programs of a run."""

    programs: int = 0
    woven: int = 0  # most of whose steps move data
    empty: int = 0  # have values without elements: not the compiler's business, but computed all the same
    computing: int = 0  # equations that compute something, of the programs that are not empty
    claimed: int = 0  # of those, in kernels
    kernels: int = 0
    untouched: int = 0  # programs with no kernel at all
    resized: int = 0  # programs that ran at another size too
    failures: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.claimed / max(self.computing, 1)


class Interpreter:
    """The reference interpreter as a target."""

    name = "interp"

    def propose(self, kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
        return [Schedule()]

    def compile(self, kernel: KernelOp, schedule: Schedule):  # noqa: ANN201
        return partial(interp.run, kernel)

    def no_sums_over_rows(self, row: int | None) -> str:
        return ""


class Varied:
    """Another target whose best schedule is any of those that it proposes, or one with the reduction shared out.

    All of them must be right.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.name, self.rng = target, target.name, random.Random(0)

    def propose(self, kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
        chosen = self.rng.choice(self.target.propose(kernel, sizes))
        if chosen.split == 1 and can_split(kernel) and self.rng.random() < 0.4:
            chosen = replace(chosen, loop=True, split=self.rng.choice([2, 3, 6]))
        return [chosen]

    def compile(self, kernel: KernelOp, schedule: Schedule):  # noqa: ANN201
        return self.target.compile(kernel, schedule)

    def no_sums_over_rows(self, row: int | None) -> str:
        return self.target.no_sums_over_rows(row)


class CutileModel:
    """The CUDA Tile target, its programs run by the model of cuTile."""

    name = "cuda_tile"

    def propose(self, kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
        return TARGET.propose(kernel, sizes)

    def compile(self, kernel: KernelOp, schedule: Schedule):  # noqa: ANN201
        if any(isinstance(op, ApplyOp) and op.fn.data in ("erf", "erfc", "fmod", "mod") for op in kernel.block.ops):
            return partial(interp.run, kernel)  # of f64, or at all: the target refuses them
        return partial(cutile_model.run, kernel, schedule)

    def no_sums_over_rows(self, row: int | None) -> str:
        return TARGET.no_sums_over_rows(row)


# The executor leaves gathers on the CPU to PyTorch, which checks their indices. Ours are in bounds.
def _kind(eqn: Equation) -> str:
    return "" if why_not(eqn) else kind_of(eqn)


def _holds(eqn: Equation) -> bool:
    return not why_not(eqn)


# As on a GPU: sums over outer dimensions write their arguments too.
COMPILER = replace(tile.COMPILER, kind=_kind, why_not=why_not, writes=lambda eqn: rule_of(eqn.op).over_rows)  # type: ignore[union-attr]
TARGETS: dict[str, Callable[[], Target | None]] = {
    "cpu": partial(named, "cpu"),
    "whole": partial(named, "cpu"),
    "dynamic": partial(named, "cpu"),
    "interp": Interpreter,
    "triton": partial(named, "triton"),
    "cutile": CutileModel,
}


@cache
def target_of(mode: str) -> Target:
    found = TARGETS[mode]()
    assert found is not None, f"no target for {mode}"
    return Varied(found) if mode in ("whole", "triton", "cutile") else found


def recorded(program: Program) -> tuple[Trace, bool]:
    """The program's trace, and whether it holds at the other size."""
    if program.others is None:
        return trace_of(program.function(), *program.inputs), False
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = []
    for x in program.inputs:
        sizes = [DimDynamic.DUCK if n == DYNAMIC else DimDynamic.STATIC for n in x.shape]
        fakes.append(mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)))
    names = [f"x{i}" for i in range(len(fakes))]
    trace, _ = record(program.function(), fakes, names, keep_whole, Builder("program", mode))
    assert mode.shape_env is not None
    holds = [g.expr.xreplace(dict.fromkeys(g.expr.free_symbols, program.grown)) for g in mode.shape_env.guards]
    return trace, not mode.shape_env.replacements and all(map(bool, holds))


def compiled(program: Program, trace: Trace, mode: str, report: Report) -> Callable[..., tuple]:
    """The program as the executors run it."""
    trace = dce(trace)
    count = 0

    def compile_region(body: Trace) -> Callable | None:
        nonlocal count
        try:
            launch = tile.compile_region(body) if mode == "cpu" else tile.build(body, target_of(mode))
        except (Unlowerable, NotImplementedError):
            return None
        count += launch is not None
        return launch

    if mode == "cpu" and "gather" not in program.families:
        trace = tile.decompose(trace)
        executor = FusionExecutor("random", tile.regions, compile_region)
    else:
        trace = recompute(duplicate(decompose(trace, _holds), COMPILER), COMPILER)
        regions = _whole if mode == "whole" else partial(fuse.fuse, compiler=COMPILER)
        executor = FusionExecutor("random", regions, compile_region)
    if mode == "interp":
        verify(trace)
    done, claims = claim(trace, [executor, "aten"])
    if not program.empty:
        computing = [e.results()[0].name for e in trace.equations if _kind(e) not in ("", VIEW)]
        inside = {name for c in claims if c.executor == "random" for name in c.results}
        report.computing += len(computing)
        report.claimed += sum(name in inside for name in computing)
        report.kernels += count
        report.untouched += count == 0
    return compile_trace(done, bind=bind)


def _whole(trace: Trace) -> list[list[int]]:
    """All of the program as one region, where there is such a kernel."""
    try:
        lower(trace)
    except Unlowerable:
        return fuse.fuse(trace, COMPILER)
    return [list(range(len(trace.equations)))]


def check(program: Program, mode: str, report: Report) -> str:
    """What is wrong with a program, in words; empty if nothing is."""
    results = []
    try:
        with enable_python_dispatcher():  # as Dynamo has it: some operators know symbolic sizes only through it
            trace, resizes = recorded(program)
            run = compiled(program, trace, mode, report)
        report.resized += resizes
        for inputs in (program.inputs, program.others) if resizes else (program.inputs,):
            with torch.no_grad():
                results.append((inputs, run(*inputs)))
    except Exception as error:  # whatever it is, it is this program's failure, and the others go on
        return f"{program}\n({mode}) {''.join(traceback.format_exception(error, limit=-4, chain=False))}"
    for inputs, got in results:
        eager, reference = program.function()(*inputs), program.reference(inputs)
        for i, (g, e, r) in enumerate(zip(got, eager, reference, strict=True)):
            if reason := wrong(g, e, r, program.coarse):
                size = "" if inputs is program.inputs else f", {program.grown} instead of {DYNAMIC}"
                return f"{program}\noutput {i} ({mode}{size}): {reason}"
    return ""


def run(mode: str, seeds: Iterable[int]) -> Report:
    report = Report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            program = make(seed, dynamic=mode == "dynamic")
            report.programs += 1
            report.woven += program.woven
            report.empty += program.empty
            if reason := check(program, mode, report):
                report.failures.append(reason)
    return report


def kernels(seeds: Iterable[int]) -> Iterator[tuple[Program, KernelOp]]:
    """The kernels of programs, not run."""
    for seed in seeds:
        program = make(seed)
        trace = duplicate(decompose(dce(trace_of(program.function(), *program.inputs)), _holds), COMPILER)
        for number, region in enumerate(fuse.fuse(trace, COMPILER)):
            yield program, lower(body_of(trace, region, f"program_{seed}_{number}"), f"program_{seed}_{number}").kernel


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, start, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(asdict(run(mode, range(start, start + count)))))
