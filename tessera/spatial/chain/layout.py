"""The memory of all parts of a chain.

In: parts, and how many of them a stage runs. Out: the listing of each, with addresses such that what stays in a core's
memory between parts lies apart from all that other parts use there. In each half of memory: what is handed from part to
part, and weights that all blocks share; then room for what any part computes; then the weights of one part behind those
of the other. Stages are alike: a place is the same on all chips of one rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.chain.parts import Part, is_common, is_left
from tessera.spatial.emit import emit
from tessera.spatial.errors import SpaceError
from tessera.spatial.listing.types import Listing
from tessera.spatial.memory.allocate import allocate
from tessera.spatial.memory.layout import Buffer, aligned, lifetimes, prove
from tessera.spatial.memory.span import Span
from tessera.spatial.tiles import Held, Tile

Half = tuple[Core, int]


class ChainLayout:
    def __init__(self, parts: list[Part], machine: SpatialMachine) -> None:
        self.parts, self.machine, self.align = parts, machine, machine.sram.align
        size, middle = machine.sram.size, machine.sram.banks // 2 * machine.sram.bank_size
        self.bounds = [(0, middle), (aligned(middle, self.align), size)] if machine.sram.banks > 1 else [(0, size)]
        self.fixed: dict[tuple, int] = {}  # addresses of what is handed on, and of what all blocks share
        self.dynamic = {part: self.computed(part) for part in parts}
        tops: dict[Half, int] = {}
        for part in parts:
            for tile in part.tiles.tiles:
                if is_left(tile) or is_common(tile):
                    self.fix(part, tile, tops)
        room: dict[Half, int] = {}
        for part, buffers in self.dynamic.items():
            for b in buffers:
                key = part.relative(b.tile.core), part.halves[b.tile]
                room[key] = max(room.get(key, 0), b.address + aligned(b.tile.nbytes, self.align))
        keys = {*tops, *room, *((p.relative(t.core), p.halves[t]) for p in parts for t in p.halves)}
        self.rooms = {key: tops.get(key, self.bounds[key[1]][0]) for key in keys}  # where what is computed begins
        self.first = {key: at + room.get(key, 0) for key, at in self.rooms.items()}  # where weights begin

    def fix(self, part: Part, tile: Tile, tops: dict[Half, int]) -> None:
        """An address that is the same in all runs: in all of a part, or of all parts."""
        core, half = part.relative(tile.core), part.halves[tile]
        if (key := self.key(part, tile)) not in self.fixed:
            at = self.fixed[key] = tops.setdefault((core, half), self.bounds[half][0])
            tops[core, half] = at + aligned(tile.nbytes, self.align)

    def key(self, part: Part, tile: Tile) -> tuple:
        return part.relative(tile.core), tile.name, None if is_left(tile) else part.name

    def computed(self, part: Part) -> list[Buffer]:
        """What a part computes, from address 0 of each half on."""
        lives = lifetimes(part.schedule)
        groups: dict[Half, list[Tile]] = defaultdict(list)
        for tile in part.tiles.tiles:
            if tile.buffer is tile and not isinstance(tile, Held) and tile in lives:
                groups[tile.core, part.halves[tile]].append(tile)
        buffers: list[Buffer] = []
        for (_, half), tiles in groups.items():
            low, high = self.bounds[half]
            placed = allocate([Span(aligned(t.nbytes, self.align), *lives[t]) for t in tiles], (high - low) // 2)
            buffers += [Buffer(t, a, *lives[t]) for t, a in zip(tiles, placed.addresses, strict=True)]
        return buffers

    def listing(self, part: Part, weights: dict[Half, int]) -> Listing:
        """A part whose weights begin where `weights` says, which is moved on behind them."""
        place = lambda t: (part.relative(t.core), part.halves[t])  # noqa: E731
        buffers = [replace(b, address=b.address + self.rooms[place(b.tile)]) for b in self.dynamic[part]]
        for tile in part.tiles.tiles:
            if isinstance(tile, Held):
                buffers.append(Buffer(tile, self.address(part, tile, weights), 0, 0))
        self.prove(buffers, part)
        return emit(part.tiles, part.schedule, buffers, self.machine)

    def address(self, part: Part, tile: Held, weights: dict[Half, int]) -> int:
        core, half = part.relative(tile.core), part.halves[tile]
        if (fixed := self.fixed.get(self.key(part, tile))) is not None:
            return fixed
        at = weights.setdefault((core, half), self.first[core, half])
        weights[core, half] = at + aligned(tile.nbytes, self.align)
        if at + tile.nbytes > self.bounds[half][1]:
            self.full(part, core, half, at + tile.nbytes)
        return at

    def again(self, listing: Listing, part: Part, weights: dict[Half, int]) -> Listing:
        """The listing of the same part for another block on the same chips: other weights, at other addresses."""
        moved = {(t.core, t.name): self.address(part, t, weights) for t in part.tiles.tiles if isinstance(t, Held)}
        pages = []
        for page in listing.pages:
            lines = [replace(b, address=moved.get((page.core, b.name), b.address)) for b in page.buffers]
            pages.append(replace(page, buffers=tuple(lines)))
        return replace(listing, pages=tuple(pages))

    def prove(self, buffers: list[Buffer], part: Part) -> None:
        on: dict[Core, list[Buffer]] = defaultdict(list)
        for b in buffers:
            on[b.tile.core].append(b)
        for mine in on.values():
            prove(mine, 0, self.machine.sram.size, self.align, part.schedule.cycles)

    def fitting(self, turns: list[Part], weights: dict[Half, int]) -> tuple[Listing, Part]:
        """The first way to lay a part into what is left of memory."""
        *others, last = turns
        for part in others:
            trial = dict(weights)
            try:
                listing = self.listing(part, trial)
            except SpaceError:
                continue
            weights.update(trial)
            return listing, part
        return self.listing(last, weights), last

    def full(self, part: Part, core: Core, half: int, needs: int) -> None:
        low, high = self.bounds[half]
        raise SpaceError(
            f"core {core.row},{core.column} of each chip of rank {core.chip} needs {needs - low:,} bytes of "
            f"{high - low:,} for {part.name} and what else its stage holds; more stages or chips a stage would do"
        )
