"""From tiles to steps: what each instruction does, how long, and what it holds; not yet when.

In: a program of tiles and a machine. Out: steps, each with its duration, what it holds from when on, the tiles it
reads and writes, and the steps that it waits for. Parts that several cores read are sent to all of them at once, when
the first of them is in turn; what comes to a core waits there in a store of limited size, so that memory is not full
of what is read much later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tessera.ir.equation import NOWHERE, Source
from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial import durations
from tessera.spatial.graph import Tree
from tessera.spatial.listing.host import operands
from tessera.spatial.listing.types import Hosted as HostAction
from tessera.spatial.routes import Route, Routes
from tessera.spatial.tiles import (
    Assembled,
    Box,
    Called,
    Computed,
    Gathered,
    Given,
    Held,
    Loaded,
    Multiplied,
    Part,
    Received,
    Scattered,
    Tile,
    Tiles,
)

Resource = tuple  # ("unit", core, name), ("read", core), ("write", core), ("link", from, to), …


@dataclass(frozen=True, eq=False)
class Use:
    """So many of a resource are held, from `offset` cycles after the start, for `duration`."""

    resource: Resource
    offset: int
    duration: int
    count: int = 1


@dataclass(eq=False)
class Step:
    """An instruction, or a send with the recvs of all that it goes to."""

    number: int
    core: Core
    kind: str  # product, expression, copy, gather, scatter, send, from_host, to_host, load, call
    duration: int
    target: Part | None
    reads: list[Part]
    uses: list[Use] = field(default_factory=list)
    after: list[tuple[Step, int]] = field(default_factory=list)  # and how many cycles after their start
    tree: Tree | None = None
    add: bool = False
    host: tuple[str, tuple] | None = None  # the host's tensor and the place in it
    host_call: HostAction | None = None
    arrivals: list[tuple[Part, Route, int]] = field(default_factory=list)  # of a send: where, by what way, when
    read_ports: int = 0
    write_ports: int = 0
    source: Source = NOWHERE
    batch: int = 0  # those before it go first
    later: int = 0  # cycles after its start at which it begins to write

    @property
    def end(self) -> int:
        """Cycles from its start until all that it writes can be read."""
        return self.duration + max((delay for _, _, delay in self.arrivals), default=self.later)

    def written(self) -> list[tuple[Part, int]]:
        """What it writes, and how many cycles after its start that begins."""
        parts = [(part, delay) for part, _, delay in self.arrivals]
        return parts if self.target is None else [*parts, (self.target, self.later)]


Touch = tuple[Tile | str, int, int]  # a tile or a tensor at the host, from when to when after a step's start


def once(step: Step, hosted: Collection[str]) -> Iterator[Touch]:
    """What a step touches of which there is only one for all runs: what they keep, and tensors at the host that are
    neither input nor output."""
    parts = [(part, 0) for part in step.reads] + step.written()
    for part, delay in parts:
        if isinstance(tile := part.tile.buffer, Held) and tile.state:
            yield tile, delay, delay + step.duration
    names = () if step.host is None else (step.host[0],)
    if step.host_call is not None:
        names = (*step.host_call.results, *operands(step.host_call))
    for name in names:
        if name in hosted:
            yield name, 0, step.duration


class Steps:
    def __init__(
        self, tiles: Tiles, machine: SpatialMachine, routes: Routes, regions: dict[Tile, int], store: int = 0
    ) -> None:
        self.tiles, self.machine, self.regions = tiles, machine, regions
        self.store = store  # bytes on a core that have come and nobody has begun to read; 0: any number
        self.stored: dict[Core, list[Tile]] = {}
        self.routes = routes
        self.steps: list[Step] = []
        self.writers: dict[Tile, list[tuple[Box, Step, int]]] = {}  # and how many cycles after its start it is written
        self.readers: dict[Tile, list[Step]] = {}
        self.waiting = self.receivers()
        self.given: dict[Tile, list[Given]] = {}
        for given in tiles.given:
            self.given.setdefault(given.part.tile, []).append(given)
        self.last_sum = {(t.core, t.home): t for t in tiles.tiles if isinstance(t, Multiplied)}
        self.product_ports: dict[Tile, int] = {}
        self.inputs = {name: shape for name, _, shape in tiles.inputs}
        self.outputs = {name: shape for name, _, shape in tiles.outputs}
        self.inputs |= (hosted := {name: shape for name, _, shape in tiles.hosted})
        self.outputs |= hosted
        self.host_bytes = {name: math.prod(shape) * dtype.itemsize for name, dtype, shape in tiles.hosted}
        self.calls = {name: called for called in tiles.calls for name in called.action.results}
        self.called: dict[Called, Step] = {}
        self.sent: dict[str, list[Step]] = {}  # to the host, by tensor

    def run(self) -> list[Step]:
        for tile in self.tiles.tiles:
            if not isinstance(tile, Received | Loaded):  # these come when somebody reads them
                self.tile(tile)
            for given in self.given.get(tile, ()):
                self.give(given)
        return self.steps

    def receivers(self) -> dict[Tile, dict[Box, list[tuple[Assembled, int, int, Part]]]]:
        """By tile and part of it: who wants it on another core."""
        wanted: dict[Tile, dict[Box, list[tuple[Assembled, int, int, Part]]]] = {}
        for tile in self.tiles.tiles:
            if isinstance(tile, Assembled):
                for part, row, column in tile.moves:
                    if part.tile.core != tile.core:
                        wanted.setdefault(part.tile, {}).setdefault(part.box, []).append((tile, row, column, part))
        return wanted

    # --- tiles ---

    def tile(self, tile: Tile) -> None:
        match tile:
            case Held():
                pass
            case Received():
                for place, top, bottom in host_rows(self.inputs[tile.tensor], tile.box):
                    part = Part(tile, (top - tile.box[0], bottom - tile.box[0], 0, tile.columns))
                    cycles = math.ceil(part.nbytes / self.machine.host.width)  # type: ignore[union-attr]
                    self.add(
                        "from_host", tile.core, "host", cycles, part, [], host=(tile.tensor, place), source=tile.source
                    )
            case Loaded():
                assert (dram := self.machine.dram) is not None
                cycles = math.ceil(tile.nbytes / dram.width)
                self.add("load", tile.core, "dram", cycles, tile.whole, [], later=dram.latency, source=tile.source)
            case Multiplied():
                for number, (x, w) in enumerate(tile.factors):
                    m, k, n = *x.shape, w.shape[1]
                    cycles = durations.product(self.machine, m, k, n, x.tile.dtype)
                    read = durations.product_bytes(self.machine, m, k, n, x.tile.dtype.itemsize)
                    self.add("product", tile.core, "matrix", cycles, tile.whole, [x, w], read=read, add=number > 0,
                             source=tile.source)  # fmt: skip
            case Computed():
                elements = max(tile.rows * tile.columns, *(p.shape[0] * p.shape[1] for p in tile.operands), 1)
                cycles = durations.expression(self.machine, tile.tree, elements)
                self.add("expression", tile.core, "vector", cycles, tile.whole, tile.operands, tree=tile.tree,
                         most=self.ports_left(tile), source=tile.source)  # fmt: skip
            case Gathered():
                nbytes = tile.nbytes + tile.index.nbytes
                self.add(
                    "gather",
                    tile.core,
                    "copy",
                    1,
                    tile.whole,
                    [tile.table, tile.index],
                    read=nbytes,
                    source=tile.source,
                )
            case Scattered():
                read = tile.values.nbytes + tile.index.nbytes
                self.add("scatter", tile.core, "copy", 1, tile.whole, [tile.index, tile.values], read=read,
                         write=tile.values.nbytes, source=tile.source)  # fmt: skip
            case Assembled():
                for part, row, column in tile.moves:
                    if part.tile.core == tile.core:
                        self.copy(tile, part, row, column)
                    else:
                        self.send_all(part)

    def ports_left(self, tile: Computed) -> int:
        """Read ports for an expression. While it reads one of several sums of a core, the array works on the next one:
        then as many as that leaves."""
        taken = max((self.product_ports.get(p.tile, 0) for p in tile.operands if not self.is_last(p.tile)), default=0)
        return max(1, self.machine.sram.read_ports - taken)

    def is_last(self, tile: Tile) -> bool:
        return self.last_sum.get((tile.core, tile.home)) is tile

    def copy(self, tile: Tile, part: Part, row: int, column: int) -> None:
        rows, columns = part.shape
        target = Part(tile, (row, row + rows, column, column + columns))
        if self.machine.copy.engines:
            self.add("copy", tile.core, "copy", 1, target, [part], source=tile.source)
        else:
            cycles = durations.expression(self.machine, 0, rows * columns)
            self.add("expression", tile.core, "vector", cycles, target, [part], tree=0, source=tile.source)

    def send_all(self, part: Part) -> None:
        """A part to all cores that read it; a core that wants it twice copies it."""
        first: dict[Core, Part] = {}
        again: list[tuple[Assembled, int, int]] = []
        for target, row, column, other in self.waiting[part.tile].pop(part.box, ()):
            rows, columns = other.shape
            if target.core in first:
                again.append((target, row, column))
            else:
                first[target.core] = Part(target, (row, row + rows, column, column + columns))
        if first:
            self.send(Part(part.tile, part.box), list(first.values()))
        for target, row, column in again:
            self.copy(target, first[target.core], row, column)

    def send(self, part: Part, targets: list[Part]) -> None:
        machine, source = self.machine, part.tile.core
        ways = [self.routes.way(source, t.tile.core) for t in targets]
        hops = {(h.source, h.target): h for way in ways for h in way.hops}
        width = min(h.edge.width for h in hops.values())
        cycles = math.ceil(part.nbytes / width)
        ports = max(1, math.ceil(min(width, part.nbytes) / machine.sram.width))
        reads, writes = min(ports, machine.sram.read_ports), min(ports, machine.sram.write_ports)
        duration = max(cycles, durations.traffic(machine, part.nbytes, part.nbytes, reads, writes))
        uses = [Use(("read", source), 0, duration, reads), *self.banks("bank_read", [part], 0, duration)]
        units = dict.fromkeys(h.edge.unit for (a, _), h in hops.items() if a == source)
        uses += [Use(("send", source, unit), 0, duration) for unit in units]
        uses += [Use(("link", a, b), h.offset, duration + h.window) for (a, b), h in hops.items()]
        arrivals: list[tuple[Part, Route, int]] = []
        for target, way in zip(targets, ways, strict=True):
            delay, core = way.delay, target.tile.core
            arrivals.append((target, way.route, delay))
            last = way.hops[-1].edge
            uses += [Use(("recv", core, last.arrives), delay, duration), Use(("write", core), delay, duration, writes)]
            uses += self.banks("bank_write", [target], delay, duration)
        step = Step(len(self.steps), source, "send", duration, None, [part], uses, arrivals=arrivals, read_ports=reads,
                    write_ports=writes, source=part.tile.source)  # fmt: skip
        self.record(step)

    def give(self, given: Given) -> None:
        part = given.part
        top = given.box[0]
        for place, a, b in host_rows(self.outputs[given.tensor], given.box):
            r, _, c, d = part.box
            piece = Part(part.tile, (r + a - top, r + b - top, c, d), part.turned)
            cycles = math.ceil(piece.nbytes / self.machine.host.width)  # type: ignore[union-attr]
            self.add(
                "to_host",
                part.tile.core,
                "host",
                cycles,
                None,
                [piece],
                host=(given.tensor, place),
                source=part.tile.source,
            )

    def call(self, called: Called) -> Step:
        """The step at which the host runs an operator: behind all that sends what it reads."""
        if called not in self.called:
            assert (host := self.machine.host) is not None and host.latency is not None and host.rate is not None
            read = operands(called.action)
            moved = sum(self.host_bytes[n] for n in (*read, *(n for n in called.action.results if n != "_")))
            cycles = host.latency + math.ceil(moved / host.rate)
            use = Use(("unit", called.core, "call"), 0, cycles)
            after = {sent: sent.duration for name in read for sent in self.sent[name]}
            step = Step(len(self.steps), called.core, "call", cycles, None, [], [use], list(after.items()),
                        host_call=called.action, source=called.source)  # fmt: skip
            step.batch = max((sent.batch for sent in after), default=0)
            self.steps.append(step)
            self.called[called] = step
        return self.called[called]

    # --- steps ---

    def add(
        self, kind: str, core: Core, unit: str, cycles: int, target: Part | None, reads: list[Part], *,
        read: int | None = None, write: int | None = None, tree: Tree | None = None, add: bool = False,
        host: tuple[str, tuple] | None = None, most: int | None = None, source: Source = NOWHERE, later: int = 0,
    ) -> None:  # fmt: skip
        machine = self.machine
        if read is None:
            read = sum(p.nbytes for p in {(id(p.tile), p.box, p.turned): p for p in reads}.values())
        write = (target.nbytes if target is not None else 0) if write is None else write
        if add:
            read += write
        fastest = max(
            cycles, machine.link.width and math.ceil(max(read, write) / max(machine.link.width, machine.sram.width))
        )
        limit = cycles if kind in ("product", "expression") else fastest
        nr = ports_for(read, limit, machine.sram.width, most or machine.sram.read_ports)
        nw = ports_for(write, limit, machine.sram.width, machine.sram.write_ports)
        if kind == "product" and target is not None:
            self.product_ports[target.tile] = nr
        duration = max(cycles, durations.traffic(machine, read, write, max(nr, 1), max(nw, 1)))
        uses = [Use(("unit", core, unit), 0, duration)]
        uses += [Use(("read", core), 0, duration, nr)] if nr else []
        uses += [Use(("write", core), later, duration, nw)] if nw else []
        touched = [*reads, target] if add and target is not None else reads
        uses += self.banks("bank_read", touched, 0, duration)
        uses += self.banks("bank_write", [target] if target is not None else [], later, duration)
        step = Step(len(self.steps), core, kind, duration, target, list(reads), uses, tree=tree, add=add, host=host,
                    read_ports=nr, write_ports=nw, source=source, later=later)  # fmt: skip
        self.record(step)

    def banks(self, what: str, parts: list[Part], offset: int, duration: int) -> list[Use]:
        """The regions of memory that parts lie in."""
        regions = {(what, p.tile.core, self.regions.get(p.tile.buffer, 0)) for p in parts}
        return [Use(r, offset, duration) for r in sorted(regions)]

    def record(self, step: Step) -> None:
        """Put a step behind those that write what it reads, or that touch what it writes again."""
        after: dict[Step, int] = {}
        for part in step.reads:
            if isinstance(part.tile, Received | Loaded) and part.tile not in self.writers:
                self.tile(part.tile)
        if step.kind == "from_host" and step.host is not None and (called := self.calls.get(step.host[0])) is not None:
            call = self.call(called)
            after[call] = call.duration
        step.number = len(self.steps)
        step.batch = max((p.tile.batch for p in [*step.reads, *(part for part, _ in step.written())]), default=0)
        if step.kind in ("send", "from_host", "load"):
            self.make_room(step, after)
        for part in step.reads:
            for box, writer, when in self.writers.get(part.tile.buffer, ()):
                if _meet(box, part.box):
                    after[writer] = max(after.get(writer, 0), when)
            self.readers.setdefault(part.tile.buffer, []).append(step)
        for part, delay in step.written():
            earlier = self.writers.setdefault(part.tile.buffer, [])
            for box, writer, when in earlier:
                if _meet(box, part.box):
                    after[writer] = max(after.get(writer, 0), when - delay)
            if part.tile.buffer is not part.tile:  # what was there before is read first
                for reader in self.readers.get(part.tile.buffer, ()):
                    after[reader] = max(after.get(reader, 0), reader.duration - delay)
            earlier.append((part.box, step, delay + step.duration))
        step.after = list(after.items())
        self.steps.append(step)
        if step.kind == "to_host" and step.host is not None:
            self.sent.setdefault(step.host[0], []).append(step)

    def make_room(self, step: Step, after: dict[Step, int]) -> None:
        """Put a step that brings something behind those that begin to read what came to the same core long before."""
        for part, _ in step.written() if self.store else ():
            tiles = self.stored.setdefault(part.tile.core, [])
            if not tiles or tiles[-1] is not part.tile:
                tiles.append(part.tile)
            while len(tiles) > 1 and sum(t.nbytes for t in tiles) > self.store:
                for reader in self.readers.get(tiles.pop(0), ()):
                    after[reader] = max(after.get(reader, 0), 0)


def ports_for(nbytes: int, cycles: int, width: int, ports: int) -> int:
    """As few as keep so many bytes within so many cycles."""
    return min(ports, max(1, math.ceil(nbytes / (max(cycles, 1) * width)))) if nbytes else 0


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


def host_rows(shape: tuple[int, ...], box: Box) -> list[tuple[tuple, int, int]]:
    """A block of a tensor that is folded into rows: places in the tensor, and the rows of each. A place has a span
    for each dimension, or a number."""
    top, bottom, left, right = box
    if not shape:
        return [((), top, bottom)]
    across = (left, right)
    if len(shape) == 1:
        return [((across,), top, bottom)]
    inner = shape[-2]
    blocks = []
    while top < bottom:
        outer, at = divmod(top, inner)
        stop = min(bottom, top - at + inner)
        place: list[object] = []
        for size in reversed(shape[:-2]):
            outer, number = divmod(outer, size)
            place.append(number)
        blocks.append(((*reversed(place), (at, at + stop - top), across), top, stop))
        top = stop
    return blocks
