"""What each rank of a pipeline does, in order: compute, send, receive.

In: a schedule and what stages send each other. Out: for each rank a list of steps. Messages between two ranks have one
order, that in which the schedule makes them, and both ranks post them in it: a send when its value is there, a receive
when a later message of the two is posted or its value is read. So queues that match sends with receives by their order
alone, as NCCL's are, serve as well as others. That no rank waits for ever is tried out before anything runs: with
messages that go only when both ends have posted them and all earlier ones of the two have gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tessera.transforms.pipelined.cut import KINDS, Part, Stages
from tessera.transforms.pipelined.schedule import Action, Schedule
from tessera.util.errors import OptionError


@dataclass(frozen=True)
class Message:
    """What a stage sends another one of another rank for a microbatch."""

    kind: str  # "F" or "B": after which program it goes
    start: int
    to: int
    microbatch: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.kind, self.start, self.to

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} from stage {self.start} to {self.to}"


@dataclass(frozen=True)
class Do:
    action: Action


@dataclass(frozen=True)
class Send:
    message: Message


@dataclass(frozen=True)
class Expect:
    """Be ready for a message; nothing waits."""

    message: Message


@dataclass(frozen=True)
class Take:
    """Wait for a message that is expected."""

    message: Message


@dataclass(frozen=True)
class Forget:
    """Drop what no later program of the stage reads."""

    part: Part
    microbatch: int


Step = Do | Send | Expect | Take | Forget


def orders(schedule: Schedule, stages: Stages) -> tuple[tuple[Step, ...], ...]:
    """The steps of each rank."""
    if schedule.stages != stages.count:
        raise OptionError(f"expected a schedule of {stages.count} stages, got one of {schedule.stages}")
    rows = _Orders(schedule, stages).rows()
    prove(rows, schedule)
    return rows


class _Orders:
    def __init__(self, schedule: Schedule, stages: Stages) -> None:
        self.schedule, self.stages, self.home = schedule, stages, schedule.home
        self.readers = {key: self.reader(key) for key in stages.sends}
        ended = {t.action: t.end for row in schedule.timed() for t in row}
        messages = [
            Message(*key, m)
            for key in stages.sends for m in range(schedule.microbatches) if self.home[key[1]] != self.home[key[2]]
        ]  # fmt: skip
        messages.sort(key=lambda m: (ended[Action(m.kind, m.microbatch, m.start)], m.kind, m.start, m.to))
        self.between: dict[frozenset[int], list[Message]] = {}
        for m in messages:
            self.between.setdefault(frozenset((self.home[m.start], self.home[m.to])), []).append(m)

    def reader(self, key: tuple[str, int, int]) -> str:
        """The kind of the first program of the receiving stage that reads a message."""
        _, _, to = key
        programs = self.stages.programs
        kinds = (k for k in KINDS if any(v in programs[k, to].inputs for v in self.stages.sends[key]))
        first = next(kinds)
        return "B" if first == "W" and not self.schedule.split else first

    def rows(self) -> tuple[tuple[Step, ...], ...]:
        return tuple(tuple(self.row(rank)) for rank in range(len(self.schedule.rows)))

    def row(self, rank: int) -> Iterator[Step]:
        left = {pair: list(messages) for pair, messages in self.between.items() if rank in pair}
        for action in self.schedule.rows[rank]:
            for messages in left.values():
                yield from self.posted(rank, messages, [m for m in messages if self.reads(action, m, rank)])
            for pair in left:
                yield from (Take(m) for m in self.between[pair] if self.reads(action, m, rank))
            yield Do(action)
            for messages in left.values():
                yield from self.posted(rank, messages, [m for m in messages if self.makes(action, m)])
            last = "W" if action.kind == "B" and not self.schedule.split else action.kind
            yield Forget((last, action.stage), action.microbatch)
        for messages in left.values():
            yield from self.posted(rank, messages, messages[-1:])

    def posted(self, rank: int, left: list[Message], wanted: Sequence[Message]) -> Iterator[Step]:
        """These messages, after all that come before them."""
        while any(m in left for m in wanted):
            message = left.pop(0)
            yield Send(message) if self.home[message.start] == rank else Expect(message)

    def makes(self, action: Action, m: Message) -> bool:
        return (action.kind, action.stage, action.microbatch) == (m.kind, m.start, m.microbatch)

    def reads(self, action: Action, m: Message, rank: int) -> bool:
        return (action.kind, action.stage, action.microbatch) == (self.readers[m.key], m.to, m.microbatch)


def in_two(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """The steps of a rank of `in_passes`: those of the forwards, with every message of theirs, and those after them."""
    last = max(i for i, step in enumerate(steps) if isinstance(step, Forget) and step.part[0] == "F") + 1
    early = [step for step in steps[last:] if isinstance(step, (Expect, Take)) and step.message.kind == "F"]
    return [*steps[:last], *early], [step for step in steps[last:] if step not in early]


def prove(rows: Sequence[Sequence[Step]], schedule: Schedule) -> None:
    """Raise where ranks would wait for each other for ever."""
    done = [0] * len(rows)
    queues: dict[frozenset[int], list[list[Message]]] = {}  # of two ranks, what each has posted in order
    gone: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while done[rank] < len(row):
                step = row[done[rank]]
                if isinstance(step, Take) and step.message not in gone:
                    break
                if isinstance(step, (Send, Expect)):
                    m = step.message
                    pair = sorted({schedule.home[m.start], schedule.home[m.to]})
                    queues.setdefault(frozenset(pair), [[], []])[pair.index(rank)].append(m)
                done[rank] += 1
                moved = True
        for ends in queues.values():
            while ends[0] and ends[1] and ends[0][0] == ends[1][0]:
                gone.add(ends[0].pop(0))
                ends[1].pop(0)
                moved = True
    stuck = [(rank, row[done[rank]]) for rank, row in enumerate(rows) if done[rank] < len(row)]
    if stuck:
        told = "; ".join(f"rank {rank} for {step.message}" for rank, step in stuck if isinstance(step, Take))
        raise OptionError(f"schedule: ranks wait for each other for ever: {told}")
    if lost := next((m for ends in queues.values() for end in ends for m in end), None):
        raise OptionError(f"schedule: expected both ends of every message, got one of {lost}")
