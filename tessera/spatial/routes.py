"""Ways through the network. In: a machine and the cores in use. Out: shortest routes from each core, around what is
dead.
"""

from __future__ import annotations

import functools
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


class Routes:
    def __init__(self, machine: SpatialMachine, cores: Sequence[Core]) -> None:
        self.machine, self.cores = machine, list(cores)
        self.inside = frozenset(cores)
        self.trees: dict[Core, dict[Core, Core]] = {}

    def route(self, source: Core, target: Core) -> Route:
        parents = self.tree(source)
        if target not in parents:
            raise MapError(f"no link leads from core {source} to core {target} of {self.machine.key}")
        way = [target]
        while way[-1] != source:
            way.append(parents[way[-1]])
        return tuple(reversed(way))

    def tree(self, source: Core) -> dict[Core, Core]:
        """The core before each on a shortest way; sources side by side turn differently, so that links share the
        load."""
        if (known := self.trees.get(source)) is None:
            known = self.trees[source] = {source: source}
            waiting = deque([source])
            while waiting:
                core = waiting.popleft()
                around = list(self.machine.neighbours(core))
                for other in around if (source.row + source.column) % 2 else around[1:] + around[:1]:
                    if other not in known and other in self.inside:
                        known[other] = core
                        waiting.append(other)
        return known

    def hops(self, route: Route) -> list[Hop]:
        found, offset, window = [], 0, 0
        for a, b in zip(route[:-1], route[1:], strict=True):
            edge = self.machine.neighbours(a)[b]
            found.append(Hop(a, b, edge, offset, window))
            offset += edge.latency
            window += edge.jitter
        return found

    def delay(self, route: Route) -> int:
        """Cycles from a send to its recv."""
        return sum(hop.edge.latency + hop.edge.jitter for hop in self.hops(route))

    @functools.cached_property
    def delays(self) -> np.ndarray:
        """Cycles of latency from each core to each other."""
        number = {core: i for i, core in enumerate(self.cores)}
        found = np.zeros((len(self.cores), len(self.cores)))
        for source in self.cores:
            row = found[number[source]]
            for core, before in self.tree(source).items():  # in the order of their distance
                if core != source:
                    edge = self.machine.neighbours(before)[core]
                    row[number[core]] = row[number[before]] + edge.latency + edge.jitter
        return found
