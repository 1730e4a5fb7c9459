"""The memory of all cores.

In: tiles, the cycles of a schedule, the machine. Out: an address and a lifetime for each tile, proven by `check`; or
an error that says which core lacks how much, and by what. Regions are of whole banks, so that instructions that touch
different regions never meet in a bank.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.errors import SpaceError
from tessera.spatial.memory.allocate import allocate
from tessera.spatial.memory.check import Laid, check
from tessera.spatial.memory.span import Span, pressure
from tessera.spatial.schedule import Schedule
from tessera.spatial.tiles import Held, Tile


@dataclass(frozen=True)
class Buffer:
    tile: Tile
    address: int
    start: int
    end: int  # 0 for one that is there always

    @property
    def always(self) -> bool:
        return isinstance(self.tile, Held)


def lay_out(tiles: list[Tile], schedule: Schedule, machine: SpatialMachine, regions: dict[Tile, int]) -> list[Buffer]:
    """Regions lie above each other, each as large as it must be, from a new bank on."""
    lives = lifetimes(schedule)
    groups: dict[Core, dict[int, list[Tile]]] = {}
    for tile in tiles:
        if tile.buffer is tile and (tile in lives or isinstance(tile, Held)):
            groups.setdefault(tile.core, {}).setdefault(regions[tile], []).append(tile)
    buffers: list[Buffer] = []
    for core in sorted(groups):
        parts = [groups[core][region] for region in sorted(groups[core])]
        if (least := sum(_least(part, lives, machine.sram.align) for part in parts)) > machine.sram.size:
            raise _full(core, machine, [t for part in parts for t in part], lives, least)
        for room in (machine.sram.size, None):  # the first layout that fits, else the lowest
            laid = _stack(parts, lives, machine, room)
            top = max((b.address + b.tile.nbytes for b in laid), default=0)
            if top <= machine.sram.size:
                break
        if top > machine.sram.size:
            raise _full(core, machine, [t for part in parts for t in part], lives, top)
        prove(laid, 0, machine.sram.size, machine.sram.align, schedule.cycles)
        buffers += laid
    return buffers


def _stack(
    regions: list[list[Tile]], lives: dict[Tile, tuple[int, int]], machine: SpatialMachine, room: int | None
) -> list[Buffer]:
    at, align, bank = 0, machine.sram.align, machine.sram.bank_size
    laid: list[Buffer] = []
    for group in regions:
        at = aligned(aligned(at, bank), align)
        for tile in group:
            if isinstance(tile, Held):
                laid.append(Buffer(tile, at, 0, 0))
                at += aligned(tile.nbytes, align)
        others = [t for t in group if not isinstance(t, Held)]
        placed = allocate([Span(aligned(t.nbytes, align), *lives[t]) for t in others], room)
        laid += [Buffer(t, at + a, *lives[t]) for t, a in zip(others, placed.addresses, strict=True)]
        at += placed.height
    return laid


def _least(tiles: list[Tile], lives: dict[Tile, tuple[int, int]], align: int) -> int:
    """Bytes that no layout of a region needs less than."""
    held = sum(aligned(t.nbytes, align) for t in tiles if isinstance(t, Held))
    return held + pressure([Span(aligned(t.nbytes, align), *lives[t]) for t in tiles if not isinstance(t, Held)])


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


def prove(buffers: list[Buffer], low: int, high: int, align: int, cycles: int) -> None:
    check(
        [Laid(b.tile.name, b.address, b.tile.nbytes, b.start, cycles + 1 if b.always else b.end) for b in buffers],
        low, high, align,
    )  # fmt: skip


def _full(
    core: Core, machine: SpatialMachine, tiles: list[Tile], lives: dict[Tile, tuple[int, int]], needs: int
) -> SpaceError:
    """What a core lacks, and by what."""
    largest = sorted(tiles, key=lambda t: -t.nbytes)[:3]
    names = ", ".join(f"{t.name} {t.nbytes:,}" for t in largest)
    weights = sum(t.nbytes for t in tiles if isinstance(t, Held))
    live = pressure([Span(t.nbytes, *lives[t]) for t in tiles if not isinstance(t, Held)])
    return SpaceError(
        f"core {core} of {machine.key} needs {needs:,} bytes and has {machine.sram.size:,}: {weights:,} of weights, up "
        f"to {live:,} at once of what is computed; the largest are {names}"
    )
