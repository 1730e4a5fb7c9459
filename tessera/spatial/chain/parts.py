"""Parts: a segment of a program mapped onto the chips of a stage.

In: a segment, a machine, chips. Out: a `Part`: tiles and when each is computed, from what an earlier part left to what
this one leaves. Where there are banks enough, memory is in halves: weights keep to one of them and what is computed to
the other, in every second part the other way round, so that blocks fill both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.chain.blocks import Segment
from tessera.spatial.chips import partitioned, pays_twice, put
from tessera.spatial.cuts import Effort
from tessera.spatial.graph import Graph, Leave, Left, Place
from tessera.spatial.importer.together import together
from tessera.spatial.listing.chain import COMMON
from tessera.spatial.mapping import check_units
from tessera.spatial.maps import Map, whole
from tessera.spatial.regions import regions_of
from tessera.spatial.routes import Routes
from tessera.spatial.schedule import Schedule, schedule
from tessera.spatial.stage import Stage
from tessera.spatial.steps import Step, Steps
from tessera.spatial.tiles import Held, Tile, Tiles
from tessera.spatial.tiling import Tiling


@dataclass(frozen=True, eq=False)
class Part:
    name: str
    ranks: dict[int, int]  # a chip, and the rank that it has in its stage
    tiles: Tiles
    schedule: Schedule
    halves: dict[Tile, int]  # of memory
    arranged: dict[str, Map]  # weights that lie in another order than their tensor

    def relative(self, core: Core) -> Core:
        """A core by its chip's rank: what stays in memory lies alike in all stages."""
        return core._replace(chip=self.ranks[core.chip])

    @functools.cached_property
    def least(self) -> int:
        """Cycles that pass at least between what an earlier part left and all that this one leaves, or gives to the
        host; of a part that reads nothing of others, those until it leaves something."""
        first = any(is_left(p.tile) for s in self.schedule.steps for p in s.reads)
        early: dict[Step, int] = {}
        ends: list[int] = []
        for step in self.schedule.steps:
            begins = [early[b] + delay for b, delay in step.after if b in early]
            if begins or not first or any(is_left(p.tile) for p in step.reads):
                early[step] = max(begins, default=0)
                if step.kind == "to_host" or any(is_left(p.tile.buffer) for p, _ in step.written()):
                    ends.append(early[step] + step.end)
        return min(ends, default=0)


def is_left(tile: Tile) -> bool:
    return isinstance(tile, Held) and not tile.tensor


def is_common(tile: Tile) -> bool:
    """The same in all blocks."""
    return isinstance(tile, Held) and not tile.state and tile.tensor.startswith(f"{COMMON}_")


def graph_of(segment: Segment, machine: SpatialMachine, stage: Stage, chips: list[int]) -> Graph:
    """A segment on the chips of a stage; where no weight can be cut, every chip computes all of it."""
    got, mesh = segment.got, stage.mesh
    local = (partitioned(got, stage, machine) if mesh.ranks > 1 else None) or got.trace
    held = dict(zip(got.trace.inputs, local.inputs, strict=True))
    weights = {held[v]: of for v, of in got.weights.items()}
    twice = lambda nbytes, ranks: pays_twice(machine, nbytes, ranks)  # noqa: E731
    carried = tuple(held[v] for v in segment.carried)
    varying = {held[v] for v in segment.varying}
    graph = together(local, got.mode, weights, mesh, twice, carried=carried, leaves=segment.leaves, varying=varying)
    put(graph, machine, [chips])
    return graph


def handed_over(graph: Graph, stages: tuple[list[int], list[int]]) -> Graph:
    """What every chip of a stage leaves, left on the chip of the same rank of the next."""
    kept = [node.home for node in graph.nodes if isinstance(node, Leave) and node.place.rank == 0]
    over = Graph("over")
    for rank, (chip, other) in enumerate(zip(*stages, strict=True)):
        over.place = Place(0, rank, 0)
        for number, home in enumerate(kept):
            left = over.left(number, home.dtype, home.rows, home.columns)
            over.add(Left(left, chip=chip))
            there = over.left(number, home.dtype, home.rows, home.columns)
            over.add(Leave(there, whole(left, (left.rows, left.columns)), chip=other))
    return over


class Mapper:
    """Maps graphs onto stages of chips; `flipped` parts have their weights in the other half of memory."""

    def __init__(self, machine: SpatialMachine, seed: int = 0) -> None:
        self.machine, self.seed = machine, seed
        self.halves = min(2, machine.sram.banks)

    def tiled(self, graph: Graph, stages: tuple[list[int], ...]) -> tuple[Tiling, Tiles, Routes, Effort]:
        machine = self.machine
        check_units(graph, machine)
        cores = [core for stage in stages for chip in stage for core in machine.cores(chip)]
        most = max(len(machine.cores(chip)) for stage in stages for chip in stage)
        effort = Effort(most, machine.sram.size // 8, 1.0, regions=self.halves, seed=self.seed)
        routes = Routes(machine, cores)
        names = dict(graph.names)
        tiling = Tiling(graph, machine, routes, effort)
        tiles = tiling.run()
        graph.names = names
        return tiling, tiles, routes, effort

    def parts(self, name: str, graph: Graph, *stages: list[int], both: bool = False) -> list[Part]:
        """The part of a graph; with `both` also the one that has its weights in the other half."""
        tiling, tiles, routes, effort = self.tiled(graph, stages)
        arranged = {name: m for (m, _), name in tiling.on.arranged_names.items()}
        ranks = {chip: rank for stage in stages for rank, chip in enumerate(stage)}
        turns = []
        for flip in (0, 1) if both and self.halves == 2 else (0,):
            regions = regions_of(tiles.tiles, self.halves)
            kept = self.halves - 1  # the half of what stays between parts
            regions |= {tile: kept ^ flip for tile in regions if is_left(tile)}
            steps = Steps(tiles, self.machine, routes, regions, effort.tile_bytes).run()
            timed = schedule(steps, self.machine)
            halves = {tile: region ^ flip for tile, region in regions.items()}
            turns.append(Part(f"{name}{'_turned' if flip else ''}", ranks, tiles, timed, halves, arranged))
        return turns
