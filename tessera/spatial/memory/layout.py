"""The memory of all cores.

In: tiles, the cycles of a schedule, the machine. Out: an address and a lifetime for each tile, proven by `check`; or
an error that says which core lacks how much, and by what. Memory is cut into regions of whole banks, so that
instructions that touch different regions never meet in a bank.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.errors import SpaceError
from tessera.spatial.memory.allocate import allocate
from tessera.spatial.memory.check import Laid, check
from tessera.spatial.memory.span import Span, pressure
from tessera.spatial.schedule import Schedule
from tessera.spatial.tiles import Held, Scattered, Tile


@dataclass(frozen=True)
class Buffer:
    tile: Tile
    address: int
    start: int
    end: int  # 0 for one that is there always

    @property
    def always(self) -> bool:
        return isinstance(self.tile, Held)


def regions_of(tiles: list[Tile], machine: SpatialMachine, count: int) -> dict[Tile, int]:
    """Tiles spread over regions by size; what is held goes where the least is held."""
    loads: dict[Core, list[int]] = {}
    found: dict[Tile, int] = {}
    for tile in tiles:
        if isinstance(tile, Scattered):
            continue
        load = loads.setdefault(tile.core, [0] * count)
        region = load.index(min(load))
        load[region] += max(tile.nbytes, 1)
        found[tile] = region
    return found


def bounds(machine: SpatialMachine, count: int, region: int) -> tuple[int, int]:
    """The bytes of a region: whole banks, from an aligned address on."""
    banks, size, align = machine.sram.banks, machine.sram.bank_size, machine.sram.align
    low, high = region * banks // count * size, (region + 1) * banks // count * size
    return -(-low // align) * align, high


def lay_out(
    tiles: list[Tile], schedule: Schedule, machine: SpatialMachine, regions: dict[Tile, int], count: int
) -> list[Buffer]:
    align = machine.sram.align
    lives = lifetimes(schedule)
    groups: dict[tuple[Core, int], list[Tile]] = {}
    for tile in tiles:
        if not isinstance(tile, Scattered) and (tile in lives or isinstance(tile, Held)):
            groups.setdefault((tile.core, regions[tile]), []).append(tile)
    buffers: list[Buffer] = []
    for (core, region), group in sorted(groups.items()):
        low, high = bounds(machine, count, region)
        held = [t for t in group if isinstance(t, Held)]
        others = [t for t in group if not isinstance(t, Held)]
        at = low
        laid: list[Buffer] = []
        for tile in held:
            laid.append(Buffer(tile, at, 0, 0))
            at += aligned(tile.nbytes, align)
        spans = [Span(aligned(t.nbytes, align), *lives[t]) for t in others]
        placed = allocate(spans, high - at)
        if at + placed.height > high:
            raise _full(core, machine, held, others, at - low, pressure(spans), placed.height, high - low)
        laid += [Buffer(t, at + a, *lives[t]) for t, a in zip(others, placed.addresses, strict=True)]
        _prove(laid, low, high, align, schedule.cycles)
        buffers += laid
    return buffers


def lifetimes(schedule: Schedule) -> dict[Tile, tuple[int, int]]:
    """From the first write to the end of the last access."""
    lives: dict[Tile, tuple[int, int]] = {}

    def touch(tile: Tile, start: int, end: int) -> None:
        before = lives.get(tile, (start, end))
        lives[tile] = min(before[0], start), max(before[1], end)

    for step in schedule.steps:
        start = schedule.starts[step]
        for part in step.reads:
            touch(part.tile.buffer, start, start + step.duration)
        for part, delay in step.written():
            touch(part.tile.buffer, start + delay, start + delay + step.duration)
    return lives


def aligned(size: int, align: int) -> int:
    return -(-size // align) * align


def _prove(buffers: list[Buffer], low: int, high: int, align: int, cycles: int) -> None:
    check(
        [Laid(b.tile.name, b.address, b.tile.nbytes, b.start, cycles + 1 if b.always else b.end) for b in buffers],
        low, high, align,
    )  # fmt: skip


def _full(
    core: Core,
    machine: SpatialMachine,
    held: list[Tile],
    others: list[Tile],
    weights: int,
    live: int,
    height: int,
    has: int,
) -> SpaceError:
    """What a core lacks, and by what."""
    largest = sorted((*held, *others), key=lambda t: -t.nbytes)[:3]
    names = ", ".join(f"{t.name} {t.nbytes:,}" for t in largest)
    return SpaceError(
        f"core {core} of {machine.key} needs {weights + height:,} bytes and has {has:,}: {weights:,} of weights, up to "
        f"{live:,} at once of what is computed; the largest are {names}"
    )
