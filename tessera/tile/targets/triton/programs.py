"""Which block of every parallel dim a program has, from the one number that it is started with.

In: a layout. Out: lines at the kernel's start. The innermost dim moves first, so that programs that run side by side
read neighbours; blocks of a matrix product go in groups of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tessera.tile.targets.triton.layout import Dim, Layout
from tessera.tile.targets.triton.names import Namer
from tessera.tile.targets.triton.spaces import Places


@dataclass(frozen=True)
class Programs:
    layout: Layout
    places: Places
    namer: Namer
    group: int  # rows of blocks whose neighbours in time read the same columns

    def write(self, program: str, start_at: Callable[[Dim, str], None]) -> None:
        """From the number `program`; `start_at` says of each dim where this program's block begins."""
        dims = self.layout.parallel
        start = self.places.start
        if len(dims) == 1 and not dims[0].tensor:
            self.places.set_position(dims[0], program)
            return
        if dims and program != "pid":
            start.append(f"pid = {program}")
        left = "pid"
        pending = list(dims)
        while pending:
            dim = pending.pop()
            pair = self.group > 1 and pending and dim.tensor and pending[-1].tensor
            if pair:
                left = self._grouped(pending.pop(), dim, left, bool(pending), start_at)
                continue
            steps = self.places.size(dim.steps)
            steps = steps if steps.isidentifier() or steps.isdigit() else f"({steps})"
            here = left if not pending else f"{left} % {steps}"
            if not dim.tensor:
                self.places.set_position(dim, here)
            else:
                if here != "pid":
                    here = self._assign("pid_" + "".join(dim.axes), here)
                start_at(dim, f"{here} * {dim.block}")
            if pending:
                left = f"{left} // {steps}"

    def _grouped(self, rows: Dim, columns: Dim, left: str, more: bool, start_at: Callable[[Dim, str], None]) -> str:
        """Blocks in groups of rows, so that neighbours in time read the same columns."""
        size, group = self.places.size, self.group
        tall = self._assign("tiles_" + "".join(rows.axes), size(rows.steps))
        long = self._assign("tiles_" + "".join(columns.axes), size(columns.steps))
        tile = self._assign("tile", f"{left} % ({tall} * {long})" if more else left)
        first = self._assign("first", f"{tile} // ({group} * {long}) * {group}")
        here = self._assign("rows", f"tl.minimum({tall} - {first}, {group})")
        row = self._assign("pid_" + "".join(rows.axes), f"{first} + {tile} % ({group} * {long}) % {here}")
        column = self._assign("pid_" + "".join(columns.axes), f"{tile} % ({group} * {long}) // {here}")
        start_at(rows, f"{row} * {rows.block}")
        start_at(columns, f"{column} * {columns.block}")
        return f"{left} // ({tall} * {long})"

    def _assign(self, wanted: str, text: str) -> str:
        name = self.namer.fresh(wanted)
        self.places.start.append(f"{name} = {text}")
        return name
