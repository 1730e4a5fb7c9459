"""The pipeline of a plan: which axis it is, its schedule, and where stages begin.

    {"pp": "1f1b"}                                  cut by cost
    {"pp": ("1f1b", ["blocks.4", "blocks.8"])}      stages begin with these modules
    {"pp": str(table)}                              a table of rank × time, as `Schedule` prints it

In: what a plan says of an axis. Out: a `Pipe`, which gives the schedule for a number of microbatches. Where nobody says
how many, a batch is cut into as many as divide its rows, at most four for each rank.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tessera.ir.mesh import Mesh
from tessera.transforms.pipelined.named_schedules import WORDS, chunks_of, idle_share, schedule
from tessera.transforms.pipelined.schedule import Schedule
from tessera.util.errors import OptionError

MOST = 4  # microbatches for each rank, where the batch decides: the bubble is a fifth then at most


@dataclass(frozen=True)
class Pipe:
    axis: str
    ranks: int
    word: str
    starts: tuple[str, ...] = ()  # the modules that stages begin with, but for the first
    table: Schedule | None = None

    @property
    def stages(self) -> int:
        return self.ranks * chunks_of(self.word) if self.table is None else self.table.stages

    def schedule(self, microbatches: int) -> Schedule:
        if self.table is None:
            return schedule(self.word, self.ranks, microbatches)
        if microbatches != self.table.microbatches:
            raise OptionError(f"microbatches: expected {self.table.microbatches}, as the table has, got {microbatches}")
        return self.table

    @property
    def home(self) -> dict[int, int]:
        """The rank of each stage."""
        return (self.table or schedule(self.word, self.ranks, self.ranks)).home

    def microbatches(self, rows: int, asked: int | None) -> int:
        """How many parts a rank's rows are cut into."""
        count = asked or self._most(rows)
        if rows % count:
            raise OptionError(f"microbatches: expected a number that divides the {rows} rows of a batch, got {count}")
        return count

    def in_table(self, rows: int, asked: int | None) -> int:
        """As `microbatches`, for a step; a table has its own number of them."""
        asked = asked or (None if self.table is None else self.table.microbatches)
        count = self.microbatches(rows, asked)
        if asked is None and count < self.ranks:
            raise OptionError(
                f"microbatches: expected rows that are cut into {self.ranks} parts or more, one for each stage, got "
                f"{rows} rows, of which {count} parts are made: ranks would do nothing for "
                f"{idle_share(self.ranks, count):.0%} of the time"
            )
        return count

    def _most(self, rows: int) -> int:
        step = self.ranks if chunks_of(self.word) > 1 else 1
        fitting = [n for n in range(1, MOST * self.ranks + 1) if rows % n == 0]
        return max([n for n in fitting if n % step == 0] or fitting)

    def check_names(self, modules: Collection[str]) -> None:
        for name in self.starts:
            if name not in modules:
                near = ", ".join(difflib.get_close_matches(name, modules, 3, 0.3)) or "none"
                raise OptionError(f"plan: {self.axis}: no module is called {name!r}; near are {near}")
        if self.starts and len(self.starts) != self.stages - 1:
            raise OptionError(
                f"plan: {self.axis}: expected {self.stages - 1} modules that begin a stage, one less than there are "
                f"stages, got {len(self.starts)}"
            )


def pipe_of(axis: str, said: object, mesh: Mesh) -> Pipe | None:
    """The pipeline that a plan says an axis is; None where it says something else."""
    word, starts = said if isinstance(said, (tuple, list)) and len(said) == 2 else (said, ())
    if axis not in mesh.names or isinstance(starts, str) or not isinstance(word, str):
        return None
    ranks = mesh.size(axis)
    if word.strip().startswith("rank 0"):
        table = Schedule.parse(word)
        if len(table.rows) != ranks:
            raise OptionError(f"plan: {axis}: expected a table of {ranks} ranks, got one of {len(table.rows)}")
        return Pipe(axis, ranks, "table", tuple(starts), table)
    return Pipe(axis, ranks, word, tuple(starts)) if word in WORDS else None


def pipe_in(plan: Mapping[str, object], mesh: Mesh) -> Pipe | None:
    """The one pipeline of a plan."""
    pipes = [pipe for axis, said in plan.items() if (pipe := pipe_of(axis, said, mesh)) is not None]
    if len(pipes) > 1:
        raise OptionError(f"plan: expected one axis with a pipeline, got {' and '.join(p.axis for p in pipes)}")
    return pipes[0] if pipes else None
