"""Memory in time: where buffers lie, how long they live, and who touches bytes that another one writes.

In: the buffers of a core and the works that use them. Out: nothing, or a violation. Whether bytes were ever written is
asked when data runs (`run.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.listing.types import Buffer
from tessera.spatial.simulator.operands import Tile
from tessera.spatial.simulator.violation import Violation, buffer_text
from tessera.spatial.simulator.work import Work


def life(buffer: Buffer) -> tuple[float, float]:
    return (-1, math.inf) if buffer.lifetime is None else buffer.lifetime


def check_buffers(machine: SpatialMachine, core: Core, buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        begin = int(max(0, life(buffer)[0]))
        wrong = ""
        if buffer.size != buffer.type.bytes:
            wrong = f"expected {buffer.type.bytes} bytes of {buffer.type}; got {buffer.size}"
        elif buffer.address % machine.sram.align:
            wrong = f"expected an address that {machine.sram.align} divides; got 0x{buffer.address:x}"
        elif buffer.address + buffer.size > machine.sram.size:
            wrong = f"expected an end within {machine.sram.size} bytes; got {buffer.address + buffer.size}"
        elif life(buffer)[0] >= life(buffer)[1]:
            wrong = "expected a lifetime that ends after it begins"
        if wrong:
            raise Violation("buffer", core, begin, wrong, buffer_text(core, buffer))
    alive: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda of: life(of)[0]):
        begin = life(buffer)[0]
        alive = [of for of in alive if life(of)[1] > begin]
        for other in alive:
            if buffer.address < other.address + other.size and other.address < buffer.address + buffer.size:
                parties = buffer_text(core, other), buffer_text(core, buffer)
                raise Violation("overlap", core, int(max(0, begin)), "expected bytes of its own", *parties)
        alive.append(buffer)


class Access(NamedTuple):
    begin: int
    end: int
    writes: bool
    tile: Tile
    work: Work


def check_accesses(core: Core, buffers: Mapping[str, Buffer], works: Sequence[Work]) -> None:
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
    for accesses in touched.values():
        check_races(accesses)


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
