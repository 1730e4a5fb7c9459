"""Ways through the network. In: a machine and the cores in use. Out: short routes from each core, around what is dead.

Between chips a way goes from gate to gate, by the fewest chips; within a chip by the fewest cores. Where a chip falls
apart without its neighbours, ways are shortest over all cores instead. All ways from one core make a tree.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.machines.spatial import Core, SpatialMachine
from tessera.machines.spatial.grid import Edge
from tessera.spatial.errors import MapError

Route = tuple[Core, ...]


@dataclass(frozen=True)
class Hop:
    """A link on a way: how many cycles after the send it is first held, and how many later what travels may come to
    it."""

    source: Core
    target: Core
    edge: Edge
    offset: int
    window: int


@dataclass(frozen=True)
class Way:
    """A route from one core to another."""

    route: Route
    hops: tuple[Hop, ...]
    delay: int  # cycles from a send to its recv


class Routes:
    def __init__(self, machine: SpatialMachine, cores: Sequence[Core]) -> None:
        self.machine, self.cores = machine, list(cores)
        self.inside = frozenset(cores)
        self.trees: dict[Core, dict[Core, Core]] = {}
        self.routes: dict[tuple[Core, Core], Route] = {}
        self.ways: dict[tuple[Core, Core], Way] = {}
        self.chip_trees: dict[tuple[int, bool], dict[int, int]] = {}
        self.known_delays: dict[tuple[Core, int | None], np.ndarray] = {}
        self.chips = {core.chip for core in cores}
        self.by_gates = len(self.chips) > 1 and self.is_whole()

    def is_whole(self) -> bool:
        """Every chip is connected by itself, and all links between chips are alive."""
        for chip in self.chips:
            mine = [core for core in self.cores if core.chip == chip]
            if len(self.search(mine[0], chip)) < len(mine):
                return False
            for other in self.machine.network.chip_neighbours(chip):
                gate, _ = self.machine.network.gate(chip, other)
                there, _ = self.machine.network.gate(other, chip)
                if other in self.chips and there not in self.machine.neighbours(gate):
                    return False
        return len(self.chip_tree(next(iter(self.chips)), False)) == len(self.chips)

    def route(self, source: Core, target: Core) -> Route:
        if (known := self.routes.get((source, target))) is None:
            chips = source.chip != target.chip and self.by_gates
            known = self.routes[source, target] = (self.far if chips else self.near)(source, target)
        return known

    def near(self, source: Core, target: Core) -> Route:
        parents = self.tree(source)
        if target not in parents:
            raise MapError(f"no link leads from core {source} to core {target} of {self.machine.key}")
        way = [target]
        while way[-1] != source:
            way.append(parents[way[-1]])
        return tuple(reversed(way))

    def far(self, source: Core, target: Core) -> Route:
        """From gate to gate."""
        before = self.chip_tree(source.chip, (source.row + source.column) % 2 == 1)
        chips = [target.chip]
        while chips[-1] != source.chip:
            chips.append(before[chips[-1]])
        way: list[Core] = [source]
        for chip, other in itertools.pairwise(reversed(chips)):
            gate, _ = self.machine.network.gate(chip, other)
            there, _ = self.machine.network.gate(other, chip)
            way += [*self.near(way[-1], gate)[1:], there]
        return (*way, *self.near(way[-1], target)[1:])

    def chip_tree(self, source: int, turned: bool) -> dict[int, int]:
        """The chip before each on a way over the fewest chips; cores side by side turn differently."""
        if (known := self.chip_trees.get((source, turned))) is None:
            known = self.chip_trees[source, turned] = {source: source}
            waiting = deque([source])
            while waiting:
                chip = waiting.popleft()
                around = self.machine.network.chip_neighbours(chip)
                for other in around[::-1] if turned else around:
                    if other not in known and other in self.chips:
                        known[other] = chip
                        waiting.append(other)
        return known

    def tree(self, source: Core) -> dict[Core, Core]:
        """The core before each on a shortest way; sources side by side turn differently, so that links share the
        load."""
        if source not in self.trees:
            self.trees[source] = self.search(source, source.chip if self.by_gates else None)
        return self.trees[source]

    def search(self, source: Core, chip: int | None) -> dict[Core, Core]:
        known = {source: source}
        waiting = deque([source])
        while waiting:
            core = waiting.popleft()
            around = list(self.machine.neighbours(core))
            for other in around if (source.row + source.column) % 2 else around[1:] + around[:1]:
                if other not in known and other in self.inside and chip in (None, other.chip):
                    known[other] = core
                    waiting.append(other)
        return known

    def way(self, source: Core, target: Core) -> Way:
        if (known := self.ways.get((source, target))) is None:
            route = self.route(source, target)
            hops = tuple(self.hops(route))
            delay = sum(hop.edge.latency + hop.edge.jitter for hop in hops)
            known = self.ways[source, target] = Way(route, hops, delay)
        return known

    def hops(self, route: Route) -> list[Hop]:
        passed, offset, window = [], 0, 0
        for a, b in zip(route[:-1], route[1:], strict=True):
            edge = self.machine.neighbours(a)[b]
            passed.append(Hop(a, b, edge, offset, window))
            offset += edge.latency
            window += edge.jitter
        return passed

    def delays(self, source: Core, targets: Sequence[Core], key: int | None) -> np.ndarray:
        """Cycles of latency from a core to each of the cores of a chip, or to all."""
        if (known := self.known_delays.get((source, key))) is None:
            if key == source.chip or not self.by_gates:
                far = self.distances(source)
                known = np.array([far[core] for core in targets], dtype=float)
            elif key is None:  # cores come chip by chip
                parts = itertools.groupby(targets, key=lambda core: core.chip)
                known = np.concatenate([self.delays(source, list(part), chip) for chip, part in parts])
            else:
                before = self.chip_tree(source.chip, (source.row + source.column) % 2 == 1)[key]
                entry, _ = self.machine.network.gate(key, before)
                known = self.way(source, entry).delay + self.delays(entry, targets, key)
            self.known_delays[source, key] = known
        return known

    def far_away(self, source: Core, targets: Sequence[Core]) -> list[int]:
        """Hops to each of some cores."""
        return [len(self.route(source, target)) - 1 for target in targets]

    def distances(self, source: Core) -> dict[Core, int]:
        """Cycles of latency to each core of its tree."""
        far = {source: 0}
        for core, before in self.tree(source).items():  # in the order of their distance
            if core != source:
                edge = self.machine.neighbours(before)[core]
                far[core] = far[before] + edge.latency + edge.jitter
        return far
