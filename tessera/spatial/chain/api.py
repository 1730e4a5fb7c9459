"""A model of equal blocks as a chain over stages of chips.

Each kind of block is mapped and scheduled once, however many there are; so compiling takes as long for eighty blocks as
for eight. A stage holds consecutive blocks; its chips share every tensor. One run ends before the next begins.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.bounds import Bound, limit
from tessera.spatial.capture import Captured
from tessera.spatial.chain.blocks import Segment, Segments, segments
from tessera.spatial.chain.layout import ChainLayout, Half
from tessera.spatial.chain.parts import Mapper, Part, graph_of, handed_over
from tessera.spatial.chips import Cut
from tessera.spatial.errors import MapError
from tessera.spatial.graph import Constant, Expression, Graph, Node
from tessera.spatial.listing import ChainedProgram, container
from tessera.spatial.listing.chain import Chain, Run, print_chain
from tessera.spatial.listing.types import Listing
from tessera.spatial.placement import arranged
from tessera.spatial.program import SpatialProgram
from tessera.spatial.stage import fits, stage_of, stages_on
from tessera.util.errors import OptionError
from tessera.util.units import counted

Source = Callable[[], Mapping[str, torch.Tensor]]
Listings = dict[str, tuple[Listing, Part]]


@dataclass(frozen=True, eq=False)
class ChainProgram:
    """A program in parts, each of which runs for several blocks. `print` it; `tessera.simulate(program, x)` runs it."""

    chain: Chain
    machine: SpatialMachine
    bound: int
    limit: int
    reasons: tuple[str, str]  # of the bound and of the limit
    sources: Mapping[str, Source] = field(repr=False)  # the tensors of a run, by its name
    choice: str = ""  # of the cut, where it was chosen

    @property
    def cycles(self) -> int:
        return self.chain.end

    @property
    def interval(self) -> int:
        """Cycles between two results, where stages work on several at once."""
        return self.chain.every or self.cycles

    @property
    def program(self) -> ChainedProgram:
        """What the simulator takes."""
        return ChainedProgram(self.chain, self.machine, lambda run: self.sources[run]())

    def part(self, name: str) -> SpatialProgram:
        """A part by itself, to read."""
        if name not in self.chain.parts:
            raise MapError(f"there is no part {name!r}; parts are {', '.join(self.chain.parts)}")
        return SpatialProgram(self.chain.parts[name], self.machine, {})

    def __str__(self) -> str:
        return print_chain(self.chain)

    def __repr__(self) -> str:
        return f"<ChainProgram on {self.machine.key}: {self.summary()}>"

    def summary(self) -> str:
        chips = {chip for run in self.chain.runs for _, chip in run.chips}
        on = f"{counted(len(chips), 'chip')} in {counted(len(self.chain.runs), 'run')}"
        return (
            f"{self.cycles:,} cycles on {on} of {counted(len(self.chain.parts), 'part')}, "
            f"{self.cycles / self.bound:.2f} × bound {self.bound:,}, limit {self.limit:,}; a result every "
            f"{self.interval:,} cycles"
        ) + (f"; cut: {self.choice}" if self.choice else "")

    def save(self, path: str | Path) -> None:
        """Write the chain, the machine and the data of each run as one `.spatial` file."""
        container.save(self.program, path)


def chained(got: Captured, machine: SpatialMachine, chips: int, cut: Cut, seed: int, choice: str = "") -> ChainProgram:
    """A model that has `cut.blocks` equal blocks. Stages stand behind each other, each with consecutive blocks and
    chips that hold parts of every tensor."""
    if cut.batches > 1:
        raise OptionError("cut: expected blocks or batches, got both")
    if cut.chips == 1 < chips:
        cut = shared_out(machine, chips, cut.blocks)
    if cut.pipeline > cut.blocks:
        raise OptionError(f"cut: expected 1 to {cut.blocks} stages for {cut.blocks} blocks, got {cut.pipeline}")
    chain = _Chain(machine, cut, seed)
    cores = tuple(core for stage in chain.stages for chip in stage for core in machine.cores(chip))
    inputs = tuple(v.name for v in got.trace.inputs if v not in got.weights)
    of = segments(got, cut.blocks)
    return replace(chain.program(of, inputs, limit(_whole(of), machine, cores)), choice=choice)


def shared_out(machine: SpatialMachine, chips: int, blocks: int) -> Cut:
    """Stages that are filled most evenly; among such, those in which the fewest chips share a tensor."""
    counts = [p for p in range(min(chips, blocks), 0, -1) if chips % p == 0 and fits(machine, chips // p, 1, p)]
    if not (cuts := [Cut(tensor=chips // p, pipeline=p, blocks=blocks) for p in counts]):
        raise OptionError(f"cut: {chips} chips of {machine.key} make no stages of equal rectangles")
    return min(cuts, key=lambda cut: math.ceil(blocks / cut.pipeline) * cut.pipeline)


class _Chain:
    """Stages of chips, the parts that they run, and where these lie in memory."""

    def __init__(self, machine: SpatialMachine, cut: Cut, seed: int) -> None:
        self.machine, self.mapper = machine, Mapper(machine, seed)
        self.stage = stage_of(machine, cut.tensor, cut.experts)
        self.stages = stages_on(machine, self.stage, cut.pipeline)
        self.kinds = [_kind(machine, stage) for stage in self.stages]
        self.graphs: dict[tuple, Graph] = {}  # of a block, by the kind of its stage
        self.turns: dict[tuple, list[Part]] = {}  # ways to lay a block into memory, likewise

    def program(self, of: Segments, inputs: tuple[str, ...], limit: Bound) -> ChainProgram:
        stages, kinds = self.stages, self.kinds
        ways_before, ways_behind = self.ways("before", of.before, stages[0]), self.ways("behind", of.behind, stages[-1])
        for kind, stage in zip(kinds, stages, strict=True):
            if kind not in self.turns:
                self.graphs[kind] = graph = graph_of(of.blocks[-1], self.machine, self.stage, stage)
                self.turns[kind] = self.mapper.parts(f"block{len(self.turns) or ''}", graph, stage, both=True)
        over = self.handovers()
        every = [*ways_before, *ways_behind, *(p for turns in self.turns.values() for p in turns), *over.values()]
        layout = ChainLayout(every, self.machine)
        of_stage = _consecutive(len(of.blocks), len(stages))
        slots, tops = self.slots(layout, [len(mine) for mine in of_stage])
        parts = {part.name: layout.listing(part, {}) for part in over.values()}
        top = dict(tops[kinds[0]])
        parts["before"], before = layout.fitting(ways_before, top)
        parts["behind"], behind = layout.fitting(ways_behind, top if len(stages) == 1 else dict(tops[kinds[-1]]))
        parts |= {name: listing for listings in slots.values() for name, (listing, _) in listings.items()}
        runs, sources, at, least_cycles = [], {}, 0, 0

        def run(name: str, own: str, part: Part, chips: list[int], data: Source) -> None:
            nonlocal at, least_cycles
            runs.append(Run(at, own, name, tuple(zip(part.ranks, chips, strict=True))))
            sources[name] = data
            at += part.schedule.cycles
            least_cycles += part.least

        run("before", "before", before, stages[0], lambda: before.tiles.tensors)
        for s, (kind, stage) in enumerate(zip(kinds, stages, strict=True)):
            for number, (own, (_, part)) in zip(of_stage[s], slots[kind].items(), strict=False):
                data = functools.partial(self.tensors, of.blocks[number], part, self.graphs[kind])
                run(f"block{number}", own, part, stage, data)
            if s + 1 < len(stages):
                part = over[_kind(self.machine, [*stage, *stages[s + 1]])]
                run(f"over{s}", part.name, part, [*stage, *stages[s + 1]], dict)
        run("behind", "behind", behind, stages[-1], lambda: behind.tiles.tensors)
        chain = Chain(inputs, parts, tuple(runs), at, _longest(runs, parts))
        reasons = "the longest way through each part", limit.reason
        return ChainProgram(chain, self.machine, max(least_cycles, limit.cycles), limit.cycles, reasons, sources)

    def ways(self, name: str, segment: Segment, stage: list[int]) -> list[Part]:
        return self.mapper.parts(name, graph_of(segment, self.machine, self.stage, stage), stage, both=True)

    def handovers(self) -> dict[tuple, Part]:
        """From each stage to the next, by how their chips stand."""
        over: dict[tuple, Part] = {}
        for one, other in itertools.pairwise(self.stages):
            if (kind := _kind(self.machine, [*one, *other])) not in over:
                graph = handed_over(next(iter(self.graphs.values())), (one, other))
                over[kind] = self.mapper.parts(f"over{len(over)}", graph, one, other)[0]
        return over

    def slots(
        self, layout: ChainLayout, counts: list[int]
    ) -> tuple[dict[tuple, Listings], dict[tuple, dict[Half, int]]]:
        """For each kind of stage, the listings of as many blocks as it holds at most, each with weights at addresses of
        its own; and where memory is free behind them."""
        slots: dict[tuple, Listings] = {}
        tops: dict[tuple, dict[Half, int]] = {}
        for kind, turns in self.turns.items():
            top = tops[kind] = {}
            listings: Listings = {}
            first: dict[Part, Listing] = {}
            for j in range(max(n for k, n in zip(self.kinds, counts, strict=True) if k == kind)):
                part = turns[j % len(turns)]
                listing = layout.again(first[part], part, top) if part in first else layout.listing(part, top)
                first.setdefault(part, listing)
                listings[f"{part.name}_{j}"] = listing, part
            slots[kind] = listings
        return slots, tops

    def tensors(self, segment: Segment, part: Part, like: Graph) -> dict[str, torch.Tensor]:
        """What a part's listing names, of another block with the same program."""
        graph = graph_of(segment, self.machine, self.stage, list(part.ranks))
        if [_program(node) for node in graph.nodes] != [_program(node) for node in like.nodes]:
            raise MapError(f"blocks of {graph.name} differ in numbers that their program would have to hold")
        constants = {node.home.name: node for node in graph.nodes if isinstance(node, Constant)}
        return {
            name: constants[name].data if name in constants else arranged(part.arranged[name], constants, t.dtype)
            for name, t in part.tiles.tensors.items()
        }


def _longest(runs: list[Run], parts: Mapping[str, Listing]) -> int:
    """Cycles that a chip is busy with one result, at most: after so many it is ready for the next."""
    spans: dict[int, tuple[int, int]] = {}
    for run in runs:
        for _, chip in run.chips:
            first, _ = spans.get(chip, (run.start, 0))
            spans[chip] = first, run.start + parts[run.part].end
    return max(last - first for first, last in spans.values())


def _program(node: Node) -> tuple:
    return type(node), node.home.name, node.tree if isinstance(node, Expression) else None


def _whole(of: Segments) -> Graph:
    """What all segments compute, as a limit counts it; what comes from the host is left out."""
    before, block, behind = (s.got.graph for s in (of.before, of.blocks[-1], of.behind))
    return Graph("whole", [*before.nodes, *block.nodes * len(of.blocks), *behind.nodes], behind.outputs)


def _consecutive(blocks: int, stages: int) -> list[range]:
    """Consecutive blocks for each stage."""
    ends = [-(-blocks * s // stages) for s in range(stages + 1)]
    return [range(*pair) for pair in itertools.pairwise(ends)]


def _kind(machine: SpatialMachine, chips: list[int]) -> tuple:
    """How some chips stand to each other: cores and links that are the same for all groups of one kind."""
    ranks = {chip: rank for rank, chip in enumerate(chips)}
    return tuple(
        (rank, core[1:], ranks[other.chip], other[1:], edge)
        for chip, rank in ranks.items()
        for core in machine.cores(chip)
        for other, edge in machine.neighbours(core).items()
        if other.chip in ranks
    )
