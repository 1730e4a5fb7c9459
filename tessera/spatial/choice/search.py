"""The best of all ways to share layers out over chips, by an integer program.

In: a `Problem`: layers in order, each of a kind, and for every shape of the chips the ways in which a kind may lie on
them, with cycles and bytes. Equal layers share their choice. Out: a `Chosen`, of least latency or of least interval.
The integer program knows all but where stages end: what it says is a bound. Dynamic programming cuts the layers into
stages, and what it finds is left out of the integer program from then on. The best is proven when the bound is not
below it. highspy is the extra `plan`; whoever can do without it asks `missing` first.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.spatial.solvers import solver

ROUNDS = 200  # of cutting off what the integer program found
NEAR = 1e-6


@dataclass(frozen=True)
class Way:
    """How a layer of some kind lies on the chips of a stage."""

    name: str
    cycles: float
    nbytes: int  # on each chip


@dataclass(frozen=True)
class Shape:
    tensor: int
    experts: int
    pipeline: int
    hop: float = 0.0  # cycles from one stage to the next

    def __str__(self) -> str:
        sizes = {"tensor": self.tensor, "experts": self.experts, "pipeline": self.pipeline}
        return " × ".join(f"{word} {n}" for word, n in sizes.items() if n > 1) or "one chip"


@dataclass(frozen=True)
class Problem:
    layers: tuple[int, ...]  # the kind of each
    ways: Mapping[Shape, Sequence[Sequence[Way]]]  # by kind
    room: int  # bytes on a chip
    throughput: bool = False


@dataclass(frozen=True)
class Chosen:
    shape: Shape
    ways: tuple[Way, ...]  # by kind
    ends: tuple[int, ...]  # where the layers of each stage end
    cost: float
    proven: bool = True


def best(problem: Problem) -> Chosen | None:
    """None where nothing fits."""
    program, found = _Program(problem), None
    for _ in range(ROUNDS):
        answer = program.solve()
        if answer is None or (found is not None and answer[0] >= found.cost - NEAR * max(1.0, found.cost)):
            return found
        _, shape, picks = answer
        ways = tuple(of[i] for of, i in zip(problem.ways[shape], picks, strict=True))
        cut = staged(problem, shape, ways)
        if cut is not None and (found is None or cut.cost < found.cost):
            found = cut
        program.leave_out(shape, picks)
    return None if found is None else Chosen(found.shape, found.ways, found.ends, found.cost, proven=False)


def staged(problem: Problem, shape: Shape, ways: tuple[Way, ...]) -> Chosen | None:
    """The layers in consecutive stages, the slowest as fast as it can be; None where they do not fit."""
    costs = [ways[kind].cycles for kind in problem.layers]
    sizes = [ways[kind].nbytes for kind in problem.layers]
    count = len(costs)

    @functools.cache
    def slowest(end: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Of the first layers in so many stages."""
        least: tuple[float, tuple[int, ...]] = (math.inf, ())
        if stages == 0:
            return (0.0, ()) if end == 0 else least
        took, held = 0.0, 0
        for start in range(end - 1, stages - 2, -1):
            took, held = took + costs[start], held + sizes[start]
            if held > problem.room or took >= least[0]:
                break
            before, ends = slowest(start, stages - 1)
            least = min(least, (max(before, took), (*ends, end)))
        return least

    for end in range(count):  # from the short ones up, so that nothing is asked for deep down
        for stages in range(1, min(end, shape.pipeline) + 1):
            slowest(end, stages)
    interval, ends = slowest(count, shape.pipeline)
    if not ends:
        return None
    latency = sum(costs) + (shape.pipeline - 1) * shape.hop
    return Chosen(shape, ways, ends, interval if problem.throughput else latency)


class _Program:
    """Which shape, and which way of each kind; stages are as even as if layers could be cut anywhere."""

    def __init__(self, problem: Problem) -> None:
        highspy = solver("highspy")
        self.problem, self.solver = problem, highspy.Highs()
        self.done = highspy.HighsModelStatus.kOptimal
        for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("mip_rel_gap", 0.0)):
            self.solver.setOptionValue(option, value)
        add, counts = self.solver.addConstr, Counter(problem.layers)
        self.cost = self.solver.addVariable(lb=0)
        self.shapes = {shape: self.solver.addBinary() for shape in problem.ways}
        self.picks = {
            (shape, kind, i): self.solver.addBinary()
            for shape, kinds in problem.ways.items()
            for kind, ways in enumerate(kinds)
            for i in range(len(ways))
        }
        add(sum(self.shapes.values()) == 1)
        for shape, kinds in problem.ways.items():
            every = [(kind, way, self.picks[shape, kind, i]) for kind, ways in enumerate(kinds)
                     for i, way in enumerate(ways)]  # fmt: skip
            for kind, ways in enumerate(kinds):
                add(sum(self.picks[shape, kind, i] for i in range(len(ways))) == self.shapes[shape])
            add(sum(counts[kind] * way.nbytes * x for kind, way, x in every) <= shape.pipeline * problem.room)
            took = sum(counts[kind] * way.cycles * x for kind, way, x in every)
            if not problem.throughput:
                add(took + (shape.pipeline - 1) * shape.hop * self.shapes[shape] - self.cost <= 0)
                continue
            add(took * (1 / shape.pipeline) - self.cost <= 0)
            for kind, ways in enumerate(kinds):
                add(sum(way.cycles * self.picks[shape, kind, i] for i, way in enumerate(ways)) - self.cost <= 0)

    def solve(self) -> tuple[float, Shape, tuple[int, ...]] | None:
        """The least cost, and what has it."""
        self.solver.minimize(self.cost)
        if self.solver.getModelStatus() != self.done:
            return None
        value = self.solver.val
        shape = next(shape for shape, x in self.shapes.items() if value(x) > 0.5)
        kinds = self.problem.ways[shape]
        picks = tuple(
            next(i for i in range(len(ways)) if value(self.picks[shape, kind, i]) > 0.5)
            for kind, ways in enumerate(kinds)
        )
        return value(self.cost), shape, picks

    def leave_out(self, shape: Shape, picks: tuple[int, ...]) -> None:
        every = sum(self.picks[shape, kind, i] for kind, i in enumerate(picks))
        self.solver.addConstr(every <= len(picks) - 1)
