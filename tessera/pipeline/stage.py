"""A stage of a pipeline, as data.

A pipeline is a list of these rows (`lists.py`). Whoever shows stages, edits them, dumps them, explains them, documents
them or stores what they made reads the list; adding a pass is one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.executors.base import Executor, passes_at
from tessera.ir.trace import Trace

if TYPE_CHECKING:
    from tessera.pipeline.run import Run

# The programs a stage may rewrite. PROGRAM is the one that was captured; the others are made of it on the way.
PROGRAM, JOINT, FORWARD, BACKWARD, STEP = "", "joint", "forward", "backward", "step"


@dataclass(frozen=True)
class Stage:
    """One row: a pass over one of the programs that are on their way."""

    name: str
    apply: Callable[..., Trace]  # takes the program, and by name what `needs` says
    why: str  # why it stands where it stands
    over: str = PROGRAM  # the program it reads
    gives: str | None = None  # the program its result is, where that is another one
    needs: tuple[str, ...] = ()  # attributes of the run that it is given
    when: Callable[[Run, Trace], bool] | None = None  # where it applies; None: always
    quiet: bool = False  # its program is kept only where it changed something

    @property
    def title(self) -> str:
        """The name by which `stages` shows it and `edit` finds it."""
        return self.name if self.gives is not None else f"{self.over} {self.name}".strip()


@dataclass(frozen=True)
class Hook:
    """A row for the passes that executors bring along: `place` is the field of the executor that lists them."""

    place: str
    why: str
    over: str = PROGRAM

    def stages(self, executors: Iterable[Executor]) -> list[Stage]:
        return [
            Stage(name, apply, f"{executor.name}: {self.why}", self.over, quiet=True)
            for executor, name, apply in passes_at(self.place, executors)
        ]


Row = Stage | Hook


def expanded(rows: Iterable[Row], executors: Iterable[Executor]) -> list[Stage]:
    """The rows with every hook's passes in place."""
    listed = list(executors)
    return [stage for row in rows for stage in (row.stages(listed) if isinstance(row, Hook) else [row])]
