"""Which weights lie in off-chip memory, and what that costs at least.

In: a graph and a machine. Out: the constants that may be streamed: what of them finds no room on a core comes while the
program runs, each time that something reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.errors import SpaceError
from tessera.spatial.graph import Constant, Gather, Graph
from tessera.spatial.maps import Home
from tessera.spatial.tiles import Loaded, Tiles

SMALL = 64  # a weight is small that takes less than this part of a core's memory


def can_stream(machine: SpatialMachine, cores: Sequence[Core]) -> bool:
    """Every chip in use reaches off-chip memory."""
    return {core.chip for core in cores} == {core.chip for core in cores if machine.has_dram(core)}


def streamed(graph: Graph, machine: SpatialMachine) -> set[Home]:
    """All that is not small, but for tables of which data choose the rows."""
    weights = [n for n in graph.nodes if isinstance(n, Constant) and not n.state]
    return {n.home for n in weights if n.nbytes * SMALL >= machine.sram.size} - gathered(graph)


def check_room(tiles: Tiles, machine: SpatialMachine) -> None:
    """What lies in off-chip memory fits there."""
    lies = {(t.core.chip, t.tensor) for t in tiles.tiles if isinstance(t, Loaded)}
    for chip in sorted({chip for chip, _ in lies}):
        needs = sum(tiles.tensors[name].nbytes for at, name in lies if at == chip)
        if machine.dram is not None and needs > machine.dram.size:
            raise SpaceError(
                f"off-chip memory of chip {chip} of {machine.key} needs {needs:,} bytes of weights and has "
                f"{machine.dram.size:,}"
            )


def gathered(graph: Graph) -> set[Home]:
    """Tables of which data choose the rows."""
    return {home for node in graph.nodes if isinstance(node, Gather) for home in node.table.homes}


def least_loaded(graph: Graph, machine: SpatialMachine, cores: Sequence[Core]) -> int:
    """Bytes that any mapping loads: of weights that are read whole, what all memory together cannot hold."""
    room, tables = machine.sram.size * len(cores), gathered(graph)
    weights = [n for n in graph.nodes if isinstance(n, Constant) and not n.state and n.home not in tables]
    if sum(n.nbytes for n in weights) <= room:
        return 0
    return max(0, sum(graph.elements_read(n.home) * n.home.dtype.itemsize for n in weights) - room)
