"""`tessera.simulate`: a program for a spatial machine run on data, or refused.

In: a program (an object, or a `.spatial` file) and its inputs. Out: a `Simulation`: outputs, state and a `Report`; or
one `Violation`. What can be seen without data is checked first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tessera.spatial.listing import ChainedProgram, Program, load
from tessera.spatial.simulator.chain import judge_chain, simulate_chain
from tessera.spatial.simulator.judge import judge, judged
from tessera.spatial.simulator.report import Report
from tessera.spatial.simulator.run import Run, check_input, check_state
from tessera.util.errors import InputError, OptionError


class HasProgram(Protocol):
    @property
    def program(self) -> Program | ChainedProgram: ...


AnyProgram = Program | ChainedProgram | HasProgram | str | Path


@dataclass(frozen=True)
class Simulation:
    """What a run gave. `output` is the only output; `state` goes into the next run."""

    outputs: tuple[torch.Tensor, ...]
    state: Mapping[str, torch.Tensor]
    report: Report

    @property
    def output(self) -> torch.Tensor:
        if len(self.outputs) != 1:
            raise InputError(f"expected a program with one output, got {len(self.outputs)}; take .outputs")
        return self.outputs[0]

    @property
    def cycles(self) -> int:
        return self.report.cycles


def simulate(
    program: AnyProgram,
    *inputs: torch.Tensor,
    state: Mapping[str, torch.Tensor] | None = None,
    jitter: int | None = None,
    runs: int = 1,
) -> Simulation:
    """Run a program for a spatial machine on data, to the cycle, and forgive nothing.

    program  a program, or the path of a .spatial file
    inputs   the program's inputs, in order
    state    what `Simulation.state` of an earlier run gave; otherwise the program's own
    jitter   a seed: what travels arrives at a random cycle of the machine's window
    runs     how many, one behind the other or overlapping, as the program says; where there are several, inputs and
             outputs have a first dimension of so many
    """
    taken = opened(program)
    names = taken.chain.inputs if isinstance(taken, ChainedProgram) else [name for name, _ in taken.listing.inputs]
    if len(inputs) != len(names):
        told = names if isinstance(taken, ChainedProgram) else [f"{name} {of}" for name, of in taken.listing.inputs]
        raise InputError(f"simulate: expected {len(names)} inputs ({', '.join(told)}), got {len(inputs)}")
    for name, given in zip(names, inputs, strict=True):
        if not isinstance(given, torch.Tensor):
            raise InputError(f"simulate: expected {name} to be a tensor, got {type(given).__name__}")
        if given.layout is not torch.strided or given.is_meta:
            kind = "on the meta device" if given.is_meta else str(given.layout)
            raise InputError(f"simulate: expected {name} to be dense and to hold data; it is {kind}")
    if state is not None and not isinstance(state, Mapping):
        raise InputError(f"simulate: expected state to be what an earlier run left; got {type(state).__name__}")
    if jitter is not None and type(jitter) is not int:
        raise OptionError(f"simulate: expected jitter to be a whole number, the seed; got {jitter!r}")
    named = {name: given.detach().cpu() for name, given in zip(names, inputs, strict=True)}
    turns = _turns(named, runs)
    kept = state or {}
    if isinstance(taken, ChainedProgram):
        results, kept, report = simulate_chain(taken, turns, kept, jitter)
    else:
        results, kept, report = _simulate(taken, turns, kept, jitter)
    outputs = results[0] if runs == 1 else tuple(torch.stack(each) for each in zip(*results, strict=True))
    return Simulation(outputs, kept, report)


def _turns(named: dict[str, torch.Tensor], runs: int) -> list[dict[str, torch.Tensor]]:
    """The inputs of each run."""
    if type(runs) is not int or runs < 1:
        raise OptionError(f"simulate: expected 1 run or more, got {runs!r}")
    if runs == 1:
        return [named]
    for name, given in named.items():
        if given.ndim == 0 or given.shape[0] != runs:
            raise InputError(f"simulate: expected {name} to be [{runs}, …], for {runs} runs; got {list(given.shape)}")
    return [{name: given[run] for name, given in named.items()} for run in range(runs)]


def _simulate(
    taken: Program, turns: list[dict[str, torch.Tensor]], state: Mapping[str, torch.Tensor], jitter: int | None
) -> tuple[list[tuple[torch.Tensor, ...]], Mapping[str, torch.Tensor], Report]:
    """Run by run, also where they overlap: the checks have shown that none sees another but by what it keeps, and is
    done with that when the next one comes."""
    for name, of in taken.listing.inputs:
        for named in turns:
            check_input(name, of, named[name])
    check_state(taken.listing, state)
    known = judged(taken.listing, taken.machine, jitter)
    results = []
    for named in turns:
        run = Run(taken.machine, taken.listing, taken.data, named, state)
        run.run(known.works, known.flows)
        results.append(run.results())
        state = run.state()
    return results, state, known.report.of_runs(len(turns), taken.listing.every or taken.listing.end)


def cost(program: AnyProgram, jitter: int | None = None) -> Report:
    """What a program costs, or what is wrong with it; without its data."""
    taken = opened(program)
    if isinstance(taken, ChainedProgram):
        return judge_chain(taken.chain, taken.machine, jitter)
    return judge(taken.listing, taken.machine, jitter).report


def opened(program: AnyProgram) -> Program | ChainedProgram:
    if isinstance(program, str | Path):
        return load(program)
    if isinstance(program, Program | ChainedProgram):
        return program
    inner = getattr(program, "program", None)
    if not isinstance(inner, Program | ChainedProgram):
        raise InputError(f"simulate: expected what map_onto gives, or a .spatial file; got {type(program).__name__}")
    return inner
