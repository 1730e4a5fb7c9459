"""Memory in time: where buffers lie, how long they live, and who touches bytes that another one writes.

In: the buffers of a core and the works that use them. Out: nothing, or a violation. Whether bytes were ever written is
asked when data runs (`run.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.listing.types import Buffer
from tessera.spatial.simulator.operands import Tile
from tessera.spatial.simulator.violation import Violation, buffer_text
from tessera.spatial.simulator.work import Work


def life(buffer: Buffer) -> tuple[float, float]:
    return (-1, math.inf) if buffer.lifetime is None else buffer.lifetime


def distance(machine: SpatialMachine, buffer: Buffer) -> int:
    """From one place of a buffer to its next."""
    return -(-buffer.size // machine.sram.align) * machine.sram.align


def check_buffers(machine: SpatialMachine, core: Core, buffers: Sequence[Buffer], every: int | None) -> None:
    ends = {id(of): of.address + (of.turns - 1) * distance(machine, of) + of.size for of in buffers}
    for buffer in buffers:
        begin = int(max(0, life(buffer)[0]))
        wrong = ""
        if buffer.size != buffer.type.bytes:
            wrong = f"expected {buffer.type.bytes} bytes of {buffer.type}; got {buffer.size}"
        elif buffer.address % machine.sram.align:
            wrong = f"expected an address that {machine.sram.align} divides; got 0x{buffer.address:x}"
        elif ends[id(buffer)] > machine.sram.size:
            wrong = f"expected an end within {machine.sram.size} bytes; got {ends[id(buffer)]}"
        elif life(buffer)[0] >= life(buffer)[1]:
            wrong = "expected a lifetime that ends after it begins"
        elif buffer.turns < 1 or (buffer.turns > 1 and every is None):
            wrong = "expected places in turn where runs overlap, and one at least"
        elif every is not None and buffer.lifetime is not None and not _in_turn(buffer, every):
            wrong = f"expected places for a lifetime of {life(buffer)[1] - life(buffer)[0]}, with a run every {every}"
        if wrong:
            raise Violation("buffer", core, begin, wrong, buffer_text(core, buffer))
    alive: list[tuple[float, Buffer]] = []
    for begin, end, buffer in sorted(_lives(buffers, every), key=lambda of: of[0]):
        alive = [(until, of) for until, of in alive if until > begin]
        for _, other in alive:
            if buffer.address < ends[id(other)] and other.address < ends[id(buffer)]:
                parties = buffer_text(core, other), buffer_text(core, buffer)
                raise Violation("overlap", core, int(max(0, begin)), "expected bytes of its own", *parties)
        alive.append((end, buffer))


def _in_turn(buffer: Buffer, every: int) -> bool:
    begin, end = life(buffer)
    return end - begin <= buffer.turns * every


def _lives(buffers: Sequence[Buffer], every: int | None) -> Iterator[tuple[float, float, Buffer]]:
    """When buffers have their bytes; where runs overlap in a round of `every` cycles, and what has several places
    always."""
    for buffer in buffers:
        begin, end = life(buffer)
        if every is None or buffer.lifetime is None:
            yield begin, end, buffer
        elif buffer.turns > 1:
            yield 0, every, buffer
        else:
            first = begin % every
            yield first, min(first + end - begin, every), buffer
            if first + end - begin > every:
                yield 0, first + end - begin - every, buffer


def check_kept(core: Core | None, name: str, accesses: Sequence[Access], every: int) -> None:
    """What there is only once, and is written, is done with before the next run comes to it."""
    first, last = min(accesses, key=lambda of: of.begin), max(accesses, key=lambda of: of.end)
    if any(of.writes for of in accesses) and last.end - first.begin > every:
        why = f"expected {name} to be done with within {every} cycles, when the next run comes; it takes"
        took = last.end - first.begin
        raise Violation("race", core, last.begin, f"{why} {took}", str(first.work.step), str(last.work.step))


class Access(NamedTuple):
    begin: int
    end: int
    writes: bool
    tile: Tile
    work: Work


def check_accesses(core: Core, buffers: Mapping[str, Buffer], works: Sequence[Work], every: int | None) -> None:
    touched: dict[str, list[Access]] = defaultdict(list)
    for work in works:
        _check_own(work)
        for writes, tiles in ((False, work.reads), (True, work.writes)):
            for tile in tiles:
                buffer = buffers[tile.ref.name]
                begin, end = life(buffer)
                if work.begin < begin or work.end > end:
                    why = f"expected an access within the buffer's life; got {work.begin}..{work.end}"
                    raise work.step.refuse("lifetime", why, buffer_text(core, buffer), cycle=work.begin)
                if writes and buffer.lifetime is None and not buffer.state:
                    raise work.step.refuse(
                        "constant", "expected a buffer that is not `always`", buffer_text(core, buffer)
                    )
                touched[tile.ref.name].append(Access(work.begin, work.end, writes, tile, work))
    for name, accesses in touched.items():
        check_races(accesses)
        if every is not None and buffers[name].lifetime is None:
            check_kept(core, name, accesses, every)


def check_races(accesses: list[Access]) -> None:
    accesses.sort(key=lambda access: (access.begin, access.end))
    running: list[Access] = []
    for access in accesses:
        running = [other for other in running if other.end > access.begin]
        for other in running:
            both = other.work is not access.work and (other.writes or access.writes)
            if both and other.tile.meets(access.tile):
                why = f"expected {access.tile.ref.name} to be left alone while another writes it"
                raise access.work.step.refuse("race", why, other.work.step, cycle=access.begin)
        running.append(access)


def _check_own(work: Work) -> None:
    """An instruction writes what it reads only where it may, and then the very same part."""
    for target in work.writes:
        for source in work.reads:
            same = source in work.over and source.ranges == target.ranges and not source.ref.transposed
            if source.ref.name == target.ref.name and not same and source.meets(target):
                raise work.step.refuse("race", f"expected {target.ref.name} not to be written while it is read")
