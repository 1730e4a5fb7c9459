"""The memory of all cores.

In: tiles, the cycles of a schedule, the machine. Out: an address and a lifetime for each tile, proven by `check`; or
an error that says which core lacks how much, and by what. Regions are of whole banks, so that instructions that touch
different regions never meet in a bank. Where runs overlap, time is a circle: what lives longer than the next run waits
has several places, which are its own for good.
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

CUTS = 64  # places at which a circle may be cut open


@dataclass(frozen=True)
class Buffer:
    tile: Tile
    address: int
    start: int
    end: int  # 0 for one that is there always
    turns: int = 1  # places, where runs overlap

    def size(self, align: int) -> int:
        """Of all places, each at a multiple of the alignment."""
        return (self.turns - 1) * aligned(self.tile.nbytes, align) + self.tile.nbytes

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
        spans = _spans([t for part in parts for t in part], lives, machine.sram.align, schedule.every)
        if (least := sum(_least(part, spans, machine.sram.align) for part in parts)) > machine.sram.size:
            raise _full(core, machine, [t for part in parts for t in part], lives, least)
        for room in (machine.sram.size, None):  # the first layout that fits, else the lowest
            laid = _stack(parts, lives, spans, machine, room, schedule.every)
            top = max((b.address + b.size(machine.sram.align) for b in laid), default=0)
            if top <= machine.sram.size:
                break
        if top > machine.sram.size:
            raise _full(core, machine, [t for part in parts for t in part], lives, top)
        prove(laid, 0, machine.sram.size, machine.sram.align, schedule.cycles, schedule.every)
        buffers += laid
    return buffers


def _spans(tiles: list[Tile], lives: dict[Tile, tuple[int, int]], align: int, every: int | None) -> dict[Tile, Span]:
    """The bytes of each tile, and when they are needed. A circle is cut open where the fewest bytes are: what lives
    there is needed all the time, as is what has several places."""
    others = [t for t in tiles if not isinstance(t, Held)]
    if every is None:
        return {t: Span(aligned(t.nbytes, align), *lives[t]) for t in others}
    whole = [t for t in others if lives[t][1] - lives[t][0] <= every]
    crossing = lambda at: sum(t.nbytes for t in whole if _since(at, lives[t], every) > every)  # noqa: E731
    starts = sorted({lives[t][0] % every for t in whole})
    cut = min(starts[:: -(-len(starts) // CUTS) or 1], key=crossing, default=0)
    spans = {t: Span(_turns(lives[t], every) * aligned(t.nbytes, align), 0, every) for t in others}
    for t in whole:
        if (end := _since(cut, lives[t], every)) <= every:
            spans[t] = Span(aligned(t.nbytes, align), end - (lives[t][1] - lives[t][0]), end)
    return spans


def _since(cut: int, life: tuple[int, int], every: int) -> int:
    """When a life ends, on a circle that is cut open."""
    return (life[0] - cut) % every + life[1] - life[0]


def _turns(life: tuple[int, int], every: int | None) -> int:
    """At how many places something lies that the next run needs too."""
    return 1 if every is None else -(-(life[1] - life[0]) // every)


def _stack(
    regions: list[list[Tile]], lives: dict[Tile, tuple[int, int]], spans: dict[Tile, Span], machine: SpatialMachine,
    room: int | None, every: int | None,
) -> list[Buffer]:  # fmt: skip
    at, align, bank = 0, machine.sram.align, machine.sram.bank_size
    laid: list[Buffer] = []
    for group in regions:
        at = aligned(aligned(at, bank), align)
        for tile in group:
            if isinstance(tile, Held):
                laid.append(Buffer(tile, at, 0, 0))
                at += aligned(tile.nbytes, align)
        others = [t for t in group if not isinstance(t, Held)]
        placed = allocate([spans[t] for t in others], room)
        for t, a in zip(others, placed.addresses, strict=True):
            laid.append(Buffer(t, at + a, *lives[t], _turns(lives[t], every)))
        at += placed.height
    return laid


def _least(tiles: list[Tile], spans: dict[Tile, Span], align: int) -> int:
    """Bytes that no layout of a region needs less than."""
    held = sum(aligned(t.nbytes, align) for t in tiles if isinstance(t, Held))
    return held + pressure([spans[t] for t in tiles if not isinstance(t, Held)])


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


def prove(buffers: list[Buffer], low: int, high: int, align: int, cycles: int, every: int | None = None) -> None:
    lives = [(b, life) for b in buffers for life in _proven(b, cycles, every)]
    check([Laid(b.tile.name, b.address, b.size(align), *life) for b, life in lives], low, high, align)


def _proven(b: Buffer, cycles: int, every: int | None) -> list[tuple[int, int]]:
    """When a buffer's bytes are its own; on a circle in two parts, where it lives past the end."""
    if b.always:
        return [(b.start, cycles + 1)]
    if every is None:
        return [(b.start, b.end)]
    if b.turns > 1:
        return [(0, every)]
    start, end = b.start % every, b.start % every + b.end - b.start
    return [(start, end)] if end <= every else [(start, every), (0, end - every)]


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
