"""From a graph to a listing, and a search over ways to get there.

In: a graph, a machine, cores. Out: the best mapping of several: how many cores a node is spread over, how large a
tile may be, how often a weight lies in memory. What does not fit is tried with smaller tiles, fewer copies and less
at once, before it is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.bounds import Bound, bound, least_interval
from tessera.spatial.cuts import Effort
from tessera.spatial.emit import emit
from tessera.spatial.errors import MapError, SpaceError
from tessera.spatial.graph import Constant, Gather, Graph, Hosted, Scatter
from tessera.spatial.listing.types import Listing
from tessera.spatial.memory.layout import Buffer, lay_out
from tessera.spatial.modulo import overlapping
from tessera.spatial.recompute import recomputed
from tessera.spatial.regions import for_arrays, regions_of
from tessera.spatial.routes import Routes
from tessera.spatial.schedule import Schedule, polished, schedule, searched
from tessera.spatial.steps import Steps
from tessera.spatial.streams import can_stream, check_room
from tessera.spatial.tiles import Tile, Tiles
from tessera.spatial.tiling import Tiling
from tessera.spatial.windows import windowed

MANY = 10  # tries from which on windows of the schedule are solved
FULL = 4, 5  # what weights may take of memory, as a rule: the rest is for values, and what is left between tiles
FEW = 4  # steps at once, where values are computed again


@dataclass(frozen=True, eq=False)
class Mapping:
    effort: Effort
    tiles: Tiles
    schedule: Schedule
    regions: dict[Tile, int]
    buffers: list[Buffer]
    listing: Listing
    bound: Bound
    least_interval: Bound | None = None  # where runs overlap
    recomputed: str = ""  # which values, for whom and why

    @property
    def cycles(self) -> int:
        return self.schedule.cycles

    @property
    def rank(self) -> tuple[int, int]:
        return self.schedule.every or self.cycles, self.cycles


def best(
    graph: Graph, machine: SpatialMachine, cores: tuple[Core, ...], tries: int, seed: int, overlap: bool = False,
    like: SpatialMachine | None = None,
) -> Mapping:  # fmt: skip
    """The shortest of several mappings; the first that fits where `tries` is 1. Where runs `overlap`, the one that
    begins most often. Tiles and their cores are chosen as for the machine `like`, where one is given."""
    check_units(graph, machine)
    check_space(graph, machine, cores)
    chosen: Mapping | None = None
    refused: SpaceError | None = None
    routes = Routes(machine, cores)
    tried = list(dict.fromkeys(efforts(graph, like or machine, cores, seed)))
    for number, effort in enumerate(tried):
        if chosen is not None and number >= tries:
            break
        try:
            mapped = one(graph, machine, routes, effort, overlap, like)
        except SpaceError as error:
            refused = error if refused is None else refused
            continue
        if chosen is None or mapped.rank < chosen.rank:
            chosen = mapped
    if chosen is None:
        assert refused is not None
        if (last := again(graph, machine, routes, tried, refused, overlap, like)) is not None:
            return last
        raise SpaceError(f"{refused}; {least_chips(graph, machine, len({core.chip for core in cores}))}")
    return shortened(alone(graph, machine, chosen), machine, tries) if tries > 1 and not overlap else chosen


def again(
    graph: Graph, machine: SpatialMachine, routes: Routes, tried: list[Effort], refused: SpaceError, overlap: bool,
    like: SpatialMachine | None,
) -> Mapping | None:  # fmt: skip
    """Where nothing fits: some values computed again near who reads them. Only steps in order, few at once, leave them
    until then, and a refusal shall not take much longer: so two of the efforts are tried once more."""
    other, values = recomputed(graph)
    in_order = {effort.window: effort for effort in reversed(tried) if 0 < effort.window <= FEW}
    for window in sorted(in_order, reverse=True) if values else ():
        try:
            mapped = one(other, machine, routes, in_order[window], overlap, like)
        except SpaceError:
            continue
        why = str(refused).split(":")[0]
        return replace(mapped, recomputed=f"recomputed: {', '.join(map(str, values))}, because {why}")
    return None


def alone(graph: Graph, machine: SpatialMachine, chosen: Mapping) -> Mapping:
    """The mapping; or one onto a single core, where ways between cores take longer than all that they save."""
    work = sum(step.duration for step in chosen.schedule.steps if step.kind != "send")
    hosts = [step.core for step in chosen.schedule.steps if step.kind == "to_host"]
    if chosen.cycles <= work or not hosts or any(node.chip is not None for node in graph.nodes):
        return chosen
    try:
        mapped = one(graph, machine, Routes(machine, hosts[:1]), replace(chosen.effort, cores=1, replicas=1.0))
    except SpaceError:
        return chosen
    return mapped if mapped.cycles < chosen.cycles else chosen


def shortened(mapped: Mapping, machine: SpatialMachine, tries: int) -> Mapping:
    """The mapping with a shorter schedule, if one is found whose buffers fit too. Windows of it are solved where many
    mappings are tried."""
    if mapped.effort.window:
        return mapped
    timed = polished(mapped.schedule, machine)
    order = searched(timed, machine, mapped.bound.cycles)
    solved = windowed(order, machine, mapped.bound.cycles) if tries >= MANY else order
    for shorter in dict.fromkeys((solved, order, timed)):
        if shorter.cycles < mapped.cycles:
            try:
                buffers = lay_out(mapped.tiles.tiles, shorter, machine, mapped.regions)
            except SpaceError:
                continue
            listing = emit(mapped.tiles, shorter, buffers, machine)
            return replace(mapped, schedule=shorter, buffers=buffers, listing=listing)
    return mapped


def efforts(graph: Graph, machine: SpatialMachine, cores: tuple[Core, ...], seed: int) -> Iterator[Effort]:
    """What to try, the most hopeful first; then what takes ever less memory."""
    count, size, banks = len(cores), machine.sram.size, machine.sram.banks
    together = count
    if any(node.chip is not None for node in graph.nodes):  # a node is spread over its chip
        count = max(Counter(core.chip for core in cores).values())
    weights = held_bytes(graph)
    replicas = max(1.0, 0.5 * size * together / max(weights, 1))
    tile = size // 4
    arrays = machine.matrix.count
    many = [for_arrays(arrays)] if arrays > 1 and for_arrays(arrays) <= banks else []
    streams = list(_streams(count, tile, banks, many, seed)) if can_stream(machine, cores) else []
    if streams and weights > size * together:  # nothing else fits
        yield from streams
        return
    for regions in (*many, 8, 4, 2, 1):
        for waves, part in ((1, tile), (2, tile), (4, tile // 4)):
            yield Effort(count, part, replicas, regions=min(regions, banks), waves=waves * arrays, seed=seed)
    yield from streams
    for fewer in sorted({max(1, count // 2), max(1, count // 4), 1} - {count}, reverse=True):
        yield Effort(fewer, tile, replicas, regions=min(4, banks), seed=seed)
    for more in range(1, 5):
        yield Effort(count, tile, replicas, regions=min(4, banks), seed=seed + more)
    for window in (64, 16, 4, 1):
        for shrink in (4, 16, 64):
            yield Effort(count, max(tile // shrink, 256), 1.0, window, 1, seed=seed)


def _streams(cores: int, tile: int, banks: int, many: list[int], seed: int) -> Iterator[Effort]:
    """Weights from off-chip memory, ever more of them."""
    for resident, regions, shrink, window in (
        *((0.5 / shrink, n, shrink, 0) for n in many for shrink in (1, 2, 4)), (0.5, 8, 1, 0), (0.25, 4, 2, 0),
        (0.25, 2, 4, 0), (0.0, 1, 4, 0), (0.0, 1, 8, 0), (0.0, 1, 16, 16), (0.0, 1, 16, 4), (0.0, 1, 64, 1),
    ):  # fmt: skip
        part = max(tile // shrink, 256)
        yield Effort(cores, part, 1.0, window, min(regions, banks), resident=resident, seed=seed)


def one(
    graph: Graph, machine: SpatialMachine, routes: Routes, effort: Effort, overlap: bool = False,
    like: SpatialMachine | None = None,
) -> Mapping:  # fmt: skip
    names = dict(graph.names)
    tiles = Tiling(
        graph, like or machine, routes if like in (None, machine) else Routes(like, routes.cores), effort
    ).run()
    graph.names = names  # the next try begins with the same names
    return scheduled(tiles, machine, routes, effort, overlap)


def scheduled(tiles: Tiles, machine: SpatialMachine, routes: Routes, effort: Effort, overlap: bool = False) -> Mapping:
    """Tiles on their cores, in time and in memory."""
    check_room(tiles, machine)
    regions = regions_of(tiles.tiles, effort.regions)
    steps = Steps(tiles, machine, routes, regions, effort.tile_bytes).run()
    timed, least = schedule(steps, machine, effort.window), None
    if overlap:
        hosted = {name for name, _, _ in tiles.hosted}
        least = least_interval(steps, machine, hosted)
        timed, buffers = most_often(tiles, overlapping(timed, machine, least.cycles, hosted), machine, regions)
    else:
        buffers = lay_out(tiles.tiles, timed, machine, regions)
    listing = emit(tiles, timed, buffers, machine)
    return Mapping(effort, tiles, timed, regions, buffers, listing, bound(steps, machine), least)


def most_often(
    tiles: Tiles, timed: Iterator[Schedule], machine: SpatialMachine, regions: dict[Tile, int]
) -> tuple[Schedule, list[Buffer]]:
    """The first schedule, of growing intervals, whose buffers fit."""
    refused: SpaceError | None = None
    for each in timed:
        try:
            return each, lay_out(tiles.tiles, each, machine, regions)
        except SpaceError as error:
            refused = error
    assert refused is not None
    raise refused


def check_units(graph: Graph, machine: SpatialMachine) -> None:
    """Rows that data choose want a copy engine; an operator for the host wants one, and a figure for its time."""
    chosen = [node for node in graph.nodes if isinstance(node, Gather | Scatter)]
    if chosen and not machine.copy.engines:
        raise MapError(
            f"{machine.key} has no copy engine (copy.engines), which reads and writes rows that data choose: called at "
            f"{chosen[0].home.source}"
        )
    call = next((node.call for node in graph.nodes if isinstance(node, Hosted)), None)
    if call is None or (machine.host is not None and machine.host.computes):
        return
    lacks = "has no host port" if machine.host is None else "does not say what its host takes (host.latency, host.rate)"
    place = f"called at {call.source}" if str(call.source) else "at an unknown line"
    raise MapError(
        f"{call.op} has no form on a spatial machine and would run on the host; {machine.key} {lacks}: {place}"
    )


def check_space(graph: Graph, machine: SpatialMachine, cores: tuple[Core, ...]) -> None:
    """No mapping is tried where all memory together is less than weights and what is kept between runs."""
    needs, has = held_bytes(graph), machine.sram.size * len(cores)
    chips = {core.chip for core in cores}
    off_chip = machine.dram.size * len(chips) if machine.dram is not None and can_stream(machine, cores) else 0
    if needs > has + off_chip:
        where = f"; with {off_chip:,} of off-chip memory {has + off_chip:,}" if off_chip else ""
        raise SpaceError(
            f"{machine.key} needs {needs:,} bytes for weights and state, and {len(cores)} cores have {has:,}{where}; "
            f"{least_chips(graph, machine, len({core.chip for core in cores}))}"
        )


def held_bytes(graph: Graph) -> int:
    """Of all weights, and of all that is kept between runs."""
    return sum(n.nbytes for n in graph.nodes if isinstance(n, Constant))


def least_chips(graph: Graph, machine: SpatialMachine, used: int) -> str:
    """A rough answer to how many chips would do instead of those used, and which type of weights."""
    weights = held_bytes(graph)
    largest = max((n.home.nbytes for n in graph.nodes if not isinstance(n, Constant)), default=0)
    per_chip = machine.sram.size * len(machine.cores())

    def chips_for(weights: int) -> int:
        return -(-(weights * FULL[1] // FULL[0] + 2 * largest) // per_chip)

    chips = max(used + 1, chips_for(weights))
    there = f", more than the {machine.chip_count} of {machine.key}" if chips > machine.chip_count else ""
    kinds = {n.home.dtype for n in graph.nodes if isinstance(n, Constant)}
    widest = max((kind.itemsize for kind in kinds if kind.is_floating_point), default=1)
    smaller = [w for w in (2, 1) if w < widest and chips_for(weights // widest * w) <= used]
    narrow = f", or weights of {8 * smaller[0]} bits" if smaller else ""
    return f"weights are {weights:,} bytes in all, a chip has {per_chip:,}; about {chips} chips would do{there}{narrow}"
