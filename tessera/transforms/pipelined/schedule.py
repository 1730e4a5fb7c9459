"""Schedules: which rank of a pipeline does what, in which order.

    rank 0  F0 F1 F2 .  .  B0 =  F3 B1 …
    rank 1  .  F0 F1 F2 …

In: numbers of ranks and microbatches. Out: a `Schedule`, a table of rank × time that prints, is edited and read again.
`F3` is the forward of microbatch 3, `B3` its backward, `W3` the part of its backward that only makes gradients of
weights, where that stands by itself; `F3/2` says which stage, where a rank has several. A dot is a pause, `=` goes on
with what began before. Times follow from the order: an action begins when what it needs is there. A table in which
ranks wait for each other for ever is refused, with who waits for what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tessera.util.errors import OptionError

_CELL = re.compile(r"^([FBW])(\d+)(?:/(\d+))?$")


@dataclass(frozen=True)
class Action:
    kind: str  # "F", "B" or "W"
    microbatch: int
    stage: int

    def needs(self, stages: int, split: bool) -> Iterator[Action]:
        """What must have ended before it begins."""
        last = self.stage == stages - 1
        match self.kind:
            case "F" if self.stage:
                yield Action("F", self.microbatch, self.stage - 1)
            case "B":
                yield Action("F" if last else "B", self.microbatch, self.stage + (not last))
                yield Action("F", self.microbatch, self.stage)
            case "W":
                yield Action("B", self.microbatch, self.stage)


@dataclass(frozen=True)
class Timed:
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    stages: int
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]  # of each rank, in order
    backward: bool = True

    def __post_init__(self) -> None:
        every = [action for row in self.rows for action in row]
        kinds = "FBW" if self.split else "FB" if self.backward else "F"
        wanted = {Action(k, m, s) for k in kinds for m in range(self.microbatches) for s in range(self.stages)}
        if twice := next((a for a in every if every.count(a) > 1), None):
            raise OptionError(f"schedule: expected every action once, got {self.text_of(twice)} twice")
        if missing := sorted(wanted - set(every), key=str):
            raise OptionError(f"schedule: expected {self.text_of(missing[0])} of stage {missing[0].stage}, got none")
        if strange := sorted(set(every) - wanted, key=str):
            raise OptionError(
                f"schedule: {self.text_of(strange[0])} of stage {strange[0].stage} is not of this pipeline"
            )
        for stage in range(self.stages):
            homes = {rank for rank, row in enumerate(self.rows) for a in row if a.stage == stage}
            if len(homes) > 1:
                raise OptionError(f"schedule: expected stage {stage} on one rank, got it on {sorted(homes)}")

    @cached_property
    def split(self) -> bool:
        """Gradients of weights are made apart."""
        return any(action.kind == "W" for row in self.rows for action in row)

    @cached_property
    def home(self) -> dict[int, int]:
        """The rank of each stage."""
        return {action.stage: rank for rank, row in enumerate(self.rows) for action in row}

    # --- time ---

    def timed(self, costs: Mapping[str, float] | None = None) -> list[list[Timed]]:
        """When each action begins and ends. Without costs, a forward takes 1, a backward 2, halves of it 1 each."""
        cost = costs or {"F": 1, "B": 1 if self.split else 2, "W": 1}
        ended: dict[Action, float] = {}
        rows: list[list[Timed]] = [[] for _ in self.rows]
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.rows):
                while len(rows[rank]) < len(row):
                    action = row[len(rows[rank])]
                    needs = list(action.needs(self.stages, self.split))
                    if not all(need in ended for need in needs):
                        break
                    start = max([rows[rank][-1].end if rows[rank] else 0.0, *(ended[need] for need in needs)])
                    ended[action] = start + cost[action.kind]
                    rows[rank].append(Timed(action, start, ended[action]))
                    moved = True
        if any(len(done) < len(row) for done, row in zip(rows, self.rows, strict=True)):
            raise OptionError(f"schedule: ranks wait for each other for ever: {self._waiting(rows, ended)}")
        return rows

    def _waiting(self, rows: list[list[Timed]], ended: Mapping[Action, float]) -> str:
        told = []
        for rank, (done, row) in enumerate(zip(rows, self.rows, strict=True)):
            if len(done) < len(row):
                action = row[len(done)]
                need = next(n for n in action.needs(self.stages, self.split) if n not in ended)
                told.append(
                    f"rank {rank} at {self.text_of(action)} for {self.text_of(need)} of rank {self.home[need.stage]}"
                )
        return "; ".join(told)

    def span(self, costs: Mapping[str, float] | None = None) -> float:
        return max(row[-1].end for row in self.timed(costs))

    def idle(self, rank: int = 0, costs: Mapping[str, float] | None = None) -> float:
        """How long a rank does nothing, until the last one is done."""
        timed = self.timed(costs)
        return max(row[-1].end for row in timed) - sum(t.end - t.start for t in timed[rank])

    def bubble(self, costs: Mapping[str, float] | None = None) -> float:
        """The share of its time that a rank does nothing."""
        return self.idle(0, costs) / self.span(costs)

    def held(self) -> list[int]:
        """Of each rank, how many microbatches it holds at once: begun, and not all of their gradients made."""
        ends, most = "W" if self.split else "B", []
        for row in self.rows:
            count = peak = 0
            for action in row:
                count += (action.kind == "F") - (action.kind == ends)
                peak = max(peak, count)
            most.append(peak)
        return most

    # --- text ---

    def text_of(self, action: Action) -> str:
        place = f"/{action.stage}" if self.stages != len(self.rows) else ""
        return f"{action.kind}{action.microbatch}{place}"

    def __str__(self) -> str:
        timed = self.timed()
        width = max(len(self.text_of(a)) for row in self.rows for a in row)
        lines = []
        for rank, row in enumerate(timed):
            cells = ["."] * int(self.span())
            for t in row:
                cells[int(t.start) : int(t.end)] = [self.text_of(t.action), *["="] * (int(t.end - t.start) - 1)]
            lines.append(f"rank {rank}  " + " ".join(f"{cell:{width}}" for cell in cells).rstrip())
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """What `str` wrote, or a person."""
        rows: list[list[Action]] = []
        for line in filter(str.strip, text.splitlines()):
            head, rank, *cells = line.split()
            if head != "rank" or rank != str(len(rows)):
                raise OptionError(f"schedule: expected the row of rank {len(rows)}, got {line!r}")
            rows.append([_read(cell, len(rows)) for cell in cells if cell not in (".", "=")])
        stages = 1 + max((a.stage for row in rows for a in row), default=-1)
        microbatches = 1 + max((a.microbatch for row in rows for a in row), default=-1)
        schedule = cls(stages, microbatches, tuple(map(tuple, rows)))
        schedule.timed()
        return schedule


def _read(cell: str, rank: int) -> Action:
    match = _CELL.match(cell)
    if match is None:
        raise OptionError(f"schedule: expected F0, B0, W0, a dot or =, got {cell!r}")
    return Action(match[1], int(match[2]), rank if match[3] is None else int(match[3]))
