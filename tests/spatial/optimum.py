"""Schedules of small programs against the shortest ones, which CP-SAT proves (ortools, the extra `plan`).

python -m tests.spatial.optimum 100          that many random programs of 8 to 40 steps; a second number is a seed
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import torch

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.capture import captured
from tessera.spatial.chips import Cut, cut_over_chips
from tessera.spatial.errors import SpaceError
from tessera.spatial.graph import Graph
from tessera.spatial.mapping import Mapping, best
from tessera.spatial.schedule import capacity
from tessera.spatial.solvers import solver
from tessera.spatial.steps import Step
from tests.spatial.random_programs import Program, random_machine

STEPS = range(8, 41)
EFFORT = 30.0  # of the solver, in its own seconds


def least(steps: list[Step], machine: SpatialMachine, known: int) -> tuple[int, bool]:
    """Cycles that no schedule of these steps is shorter than, and whether one is as short; `known`: of one that is."""
    cp_model = solver("ortools")
    model = cp_model.CpModel()
    starts = {s: model.new_int_var(0, known, f"s{s.number}") for s in steps}
    end = model.new_int_var(0, known, "end")
    held: dict[tuple, list] = {}
    for s in steps:
        model.add(end >= starts[s] + s.end)
        for before, delay in s.after:
            model.add(starts[s] >= starts[before] + delay)
        for use in s.uses:
            while_held = model.new_fixed_size_interval_var(starts[s] + use.offset, use.duration, "")
            held.setdefault(use.resource, []).append((while_held, use.count))
    for resource, users in held.items():
        times, counts = zip(*users, strict=True)
        model.add_cumulative(times, counts, capacity(resource, machine))
    model.minimize(end)
    search = cp_model.CpSolver()
    search.parameters.num_workers, search.parameters.max_deterministic_time = 1, EFFORT
    status = search.solve(model)
    return round(search.best_objective_bound), status == cp_model.OPTIMAL


def graph_of(
    seed: int, widths: tuple[int, ...] = (3, 8, 17, 24), rows: tuple[int, ...] = (1, 2, 5, 17)
) -> tuple[Graph, SpatialMachine, tuple[Core, ...]]:
    """A random program, a random machine, and its cores."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    machine, width = random_machine(chance), chance.choice(widths)
    x = torch.randn((*chance.choice([(), (2,)]), chance.choice(rows), width), dtype=torch.float64)
    graph, cores = cut_over_chips(captured(Program(chance, width).double(), (x,), {}), machine, 1, Cut())
    return graph, machine, cores


def mapped(seed: int) -> tuple[Mapping, SpatialMachine] | None:
    """A random program as it is mapped with the usual effort; none that is too large or does not fit."""
    graph, machine, cores = graph_of(seed)
    try:
        found = best(graph, machine, cores, 3, seed % 3)
    except SpaceError:
        return None
    # One that takes little at once is longer for the sake of memory, which CP-SAT is not told of.
    return None if found.effort.window or len(found.schedule.steps) not in STEPS else (found, machine)


def ratios(count: int, seed: int) -> Iterator[tuple[int, float, bool]]:
    """Seeds; cycles over the shortest schedule's, or over what is proven of it; whether that is the shortest."""
    while count:
        if (got := mapped(seed)) is not None:
            found, machine = got
            low, proven = least(found.schedule.steps, machine, found.cycles)
            yield seed, found.cycles / low, proven
            count -= 1
        seed += 1


if __name__ == "__main__":
    count, first = (int(arg) for arg in (*sys.argv[1:], "0")[:2])
    seen = []
    for seed, ratio, proven in ratios(count, first):
        seen.append(ratio)
        if ratio > 1:
            print(f"{seed}: {ratio:.4f}{'' if proven else ', not proven'}", flush=True)
    over = sum(ratio > 1.05 for ratio in seen)
    print(f"{count} programs: {seen.count(1.0)} shortest, worst {max(seen):.4f}, {over} over 1.05")
