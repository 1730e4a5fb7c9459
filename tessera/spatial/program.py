"""What `map_onto` gives: a program a person reads, runs, edits and puts back."""

from __future__ import annotations

import functools
from collections.abc import Mapping as Table
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tessera.ir.trace import Trace
from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.bounds import Bound
from tessera.spatial.dialect.text import parse as tiles_of
from tessera.spatial.dialect.text import to_text
from tessera.spatial.errors import MapError
from tessera.spatial.listing import container, parse, print_listing, print_page
from tessera.spatial.listing.text import action_text
from tessera.spatial.listing.types import CorePage, Instruction, Listing
from tessera.spatial.mapping import Mapping, scheduled, shortened
from tessera.spatial.routes import Routes
from tessera.spatial.tiles import Kept
from tessera.util.units import counted

TILES = "builtin.module"  # how the text of tiles begins
TRIES = 2  # edited tiles have their schedule improved


@dataclass(frozen=True, eq=False)
class SpatialProgram:
    """A program for every core of a machine, to the cycle. `print` it; `tessera.simulate(program, x)` runs it."""

    listing: Listing
    machine: SpatialMachine
    data: Table[str, torch.Tensor]
    bound: int = 0
    limit: int = 0
    reasons: tuple[str, str] = ("", "")  # of the bound and of the limit
    trace: Trace | None = None
    mapping: Mapping | None = None
    choice: str = ""  # of the cut, where it was chosen
    left: str = ""  # what was asked for and not done, and why

    @property
    def cycles(self) -> int:
        return self.listing.end

    @property
    def program(self) -> container.Program:
        """What the simulator takes."""
        return container.Program(self.listing, self.machine, dict(self.data))

    @property
    def interval(self) -> int:
        """Cycles between the beginnings of two runs."""
        return self.listing.every or self.cycles

    def __str__(self) -> str:
        return print_listing(self.listing)

    def __repr__(self) -> str:
        return f"<SpatialProgram on {self.machine.key}: {self.summary()}>"

    def summary(self) -> str:
        """Cycles, how near they are to what is possible, and what is at fault."""
        text = f"{self.cycles:,} cycles on {counted(len(self.listing.pages), 'core')}"
        if self.bound:
            text += f", {self.cycles / self.bound:.2f} × bound {self.bound:,} ({self.reasons[0]})"
        if self.limit:
            text += f", limit {self.limit:,} ({self.reasons[1]})"
        if self.mapping is not None and (least := self.mapping.least_interval) is not None:
            text += f"; a run every {self.interval:,}, {self.interval / least.cycles:.2f} × {least}"
        if self.mapping is not None and self.mapping.recomputed:
            text += f"; {self.mapping.recomputed}"
        if self.choice:
            text += f"; cut: {self.choice}"
        return f"{text}; {self.left}" if self.left else text

    def core(self, *place: int) -> str:
        """The page of a core: `core(row, column)`, or `core(chip, row, column)`."""
        if len(place) not in (2, 3):
            raise MapError(f"core: expected a row and a column, or a chip before them; got {place}")
        return print_page(self.page(Core(*place) if len(place) == 3 else Core(0, *place)))

    def page(self, core: Core) -> CorePage:
        for page in self.listing.pages:
            if page.core == core:
                return page
        cores = ", ".join(str(p.core) for p in self.listing.pages)
        raise MapError(f"core {core} has nothing to do; there are pages of {cores}")

    @functools.cached_property
    def stages(self) -> dict[str, str]:
        """The program at every stage: captured, as tiles on cores, and as a listing."""
        texts = {} if self.trace is None else {"captured": str(self.trace)}
        if self.mapping is not None:
            texts["placed"] = to_text(self.mapping.tiles)
        return {**texts, "listing": str(self)}

    def why(self, name: str) -> str:
        """When and where something is computed, and what it waited for: a module, a line `file:number`, or a buffer."""
        rows = []
        for page in self.listing.pages:
            for i in page.instructions:
                if name in (i.module, i.source) or i.module.startswith(f"{name}.") or _mentions(i, name):
                    rows.append(
                        (
                            i.start,
                            f"@{i.start}..{i.start + i.duration}  core {page.core}  {'+'.join(i.units)}  {_text(i)}",
                        )
                    )
        if not rows:
            known = sorted({i.module for p in self.listing.pages for i in p.instructions if i.module})
            raise MapError(f"nothing is called {name!r}; modules are {', '.join(known) or 'none'}")
        rows.sort()
        start = rows[0][0]
        return "\n".join([f"{name}: {len(rows)} instructions from cycle {start} on", *(text for _, text in rows)])

    def save(self, path: str | Path) -> None:
        """Write the listing, the machine and the data as one `.spatial` file."""
        container.save(self.program, path)

    def edited(self, text: str) -> SpatialProgram:
        """The program with another listing, such as an edited `str(program)`, or with other tiles, such as an edited
        `stages["placed"]`, which are scheduled anew. Whether it is right, `simulate` says."""
        if text.lstrip().startswith(TILES):
            return self._rescheduled(text)
        return replace(self, listing=parse(text), mapping=None)

    def _rescheduled(self, text: str) -> SpatialProgram:
        if self.mapping is None or any(isinstance(tile, Kept) for tile in self.mapping.tiles.tiles):
            raise MapError("expected a listing: only of a program that was mapped whole are the tiles known")
        tiles = tiles_of(text, self.mapping.tiles.tensors)
        chips = sorted({t.core.chip for t in tiles.tiles if t.core.chip < self.machine.chip_count})
        cores = tuple(core for chip in chips for core in self.machine.cores(chip))
        if wrong := [tile for tile in tiles.tiles if tile.core not in cores]:
            raise MapError(f"{wrong[0].name}: expected a core of {self.machine.key} that is alive, got {wrong[0].core}")
        overlap = self.mapping.least_interval is not None
        mapped = scheduled(tiles, self.machine, Routes(self.machine, cores), self.mapping.effort, overlap)
        mapped = mapped if overlap else shortened(mapped, self.machine, TRIES)
        # What no mapping of the model can do better than says nothing of edited tiles.
        return program(mapped, self.machine, Bound(0, ""), self.trace)


def _mentions(i: Instruction, name: str) -> bool:
    target = getattr(i.action, "target", None)
    return target is not None and target.name == name


def _text(i: Instruction) -> str:
    return " ".join(filter(None, (action_text(i.action), i.module, i.source)))


def program(
    mapped: Mapping, machine: SpatialMachine, limit: Bound, trace: Trace | None, choice: str = "", left: str = ""
) -> SpatialProgram:
    bound, reasons = max(mapped.bound.cycles, limit.cycles), (mapped.bound.reason, limit.reason)
    data = mapped.tiles.tensors
    return SpatialProgram(mapped.listing, machine, data, bound, limit.cycles, reasons, trace, mapped, choice, left)
