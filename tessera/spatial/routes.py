"""Ways through the network. In: a machine. Out: a tree of shortest routes from each core, around what is dead."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tessera.machines.spatial import Core, SpatialMachine
from tessera.machines.spatial.grid import Edge
from tessera.spatial.errors import MapError

Route = tuple[Core, ...]


@dataclass(frozen=True)
class Hop:
    """A link on a way, and how many cycles after the send it is first held."""

    source: Core
    target: Core
    edge: Edge
    offset: int


class Routes:
    def __init__(self, machine: SpatialMachine) -> None:
        self.machine = machine
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
        """The core before each on a shortest way; sources side by side turn differently, so that links share the load."""
        if (known := self.trees.get(source)) is None:
            known = self.trees[source] = {source: source}
            waiting = deque([source])
            while waiting:
                core = waiting.popleft()
                around = list(self.machine.neighbours(core))
                for other in around if (source.row + source.column) % 2 else around[1:] + around[:1]:
                    if other not in known:
                        known[other] = core
                        waiting.append(other)
        return known

    def hops(self, route: Route) -> list[Hop]:
        found, offset = [], 0
        for a, b in zip(route[:-1], route[1:], strict=True):
            edge = self.machine.neighbours(a)[b]
            found.append(Hop(a, b, edge, offset))
            offset += edge.latency
        return found

    def delay(self, route: Route) -> int:
        """Cycles from a send to its recv."""
        return sum(hop.edge.latency + hop.edge.jitter for hop in self.hops(route))
