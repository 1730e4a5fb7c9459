"""One rank of a pipeline at work: it computes, sends and receives in the order that was derived for it.

In: the programs of stages, a rank's steps, weights and microbatches by value, and a channel to the other ranks. Out:
results of each microbatch and sums of gradients. A value that no message brings is missed at once. `together` runs all
ranks of a pipeline in one process, where every rank has values of its own; the channel between processes is
`tessera/distributed/channel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tessera.ir.equation import Value, values_in
from tessera.transforms.pipelined.cut import KINDS, Part, Stages
from tessera.transforms.pipelined.orders import Do, Expect, Forget, Message, Send, Step, Take, orders
from tessera.transforms.pipelined.schedule import Action, Schedule

Env = dict[Value, object]
Execute = Callable[[Part, list], Sequence]  # runs one program; one without equations gives nothing


class Channel(Protocol):
    def expect(self, message: Message) -> None:
        """Be ready for it."""

    def send(self, message: Message, values: Sequence) -> None:
        """Let it go; whoever sends may go on at once."""

    def take(self, message: Message) -> Sequence | None:
        """What came, waiting for it; None where it can only come once others have been run."""


class Worker:
    """One rank. `results` and `sums` are complete when `run` is through."""

    def __init__(
        self,
        stages: Stages,
        steps: Sequence[Step],
        execute: Execute,
        add: Callable,
        channel: Channel,
        grads: Sequence[Value],
        split: bool,
    ) -> None:
        self.stages, self.steps, self.execute, self.add, self.channel = stages, steps, execute, add, channel
        self.grads, self.split = set(grads), split
        self.own = {step.action.stage for step in steps if isinstance(step, Do)}
        self.keeps = {part: self._kept(*part) for part in stages.programs}

    def _kept(self, kind: str, stage: int) -> set[Value]:
        """What later programs of a stage read, or send, once this one has run and sent."""
        later = KINDS[KINDS.index(kind) + 1 :]
        read = {v for k in later for v in self.stages.programs[k, stage].inputs}
        return read | {v for k in later for _, values in self.stages.sent(k, stage) for v in values}

    def run(
        self,
        weights: Mapping[Value, object],
        batches: Sequence[Mapping[Value, object]],
        sums: Mapping[Value, object] | None = None,
    ) -> Iterator[None]:
        """Every step in turn; it stops where a message can only come once other ranks have been run. Gradients are
        added to `sums`."""
        self.begin(weights, batches, sums)
        return self.go(self.steps)

    def begin(
        self,
        weights: Mapping[Value, object],
        batches: Sequence[Mapping[Value, object]],
        sums: Mapping[Value, object] | None = None,
    ) -> None:
        self.weights, self.batches = weights, batches
        self.results: list[Env] = [{} for _ in batches]
        self.sums: Env = dict(sums or {})
        self.held: dict[tuple[int, int], Env] = {}  # of a stage and a microbatch

    def go(self, steps: Sequence[Step]) -> Iterator[None]:
        for step in steps:
            match step:
                case Do(action):
                    for kind in ("B", "W") if action.kind == "B" and not self.split else (action.kind,):
                        self.do(Action(kind, action.microbatch, action.stage))
                case Send(message):
                    self.send(message)
                case Expect(message):
                    self.channel.expect(message)
                case Take(message):
                    while not self.take(message):
                        yield
                case Forget(part, microbatch):
                    self.forget(part, microbatch)

    # What these name dies when they return: a generator's own locals would keep a microbatch's tensors.

    def send(self, message: Message) -> None:
        held = self.held[message.start, message.microbatch]
        self.channel.send(message, [held[v] for v in self.stages.sends[message.key]])

    def take(self, message: Message) -> bool:
        values = self.channel.take(message)
        if values is not None:
            named = zip(self.stages.sends[message.key], values, strict=True)
            self.held.setdefault((message.to, message.microbatch), {}).update(named)
        return values is not None

    def forget(self, part: Part, microbatch: int) -> None:
        held = self.held[part[1], microbatch]
        self.held[part[1], microbatch] = {v: x for v, x in held.items() if v in self.keeps[part]}

    def clear(self) -> None:
        """Let go of a step's tensors."""
        self.weights, self.batches, self.results, self.sums, self.held = {}, (), [], {}, {}

    def do(self, action: Action) -> None:
        """One action: run the program, keep what it gave, hand it to stages of this rank that wait for it."""
        part, microbatch = (action.kind, action.stage), action.microbatch
        program, held = self.stages.programs[part], self.held.setdefault((action.stage, microbatch), {})
        batch = self.batches[microbatch]
        args = [held[v] if v in held else batch[v] if v in batch else self.weights[v] for v in program.inputs]
        outputs = self.execute(part, args)
        for v, x in zip(values_in(program.outputs), outputs, strict=True):
            held[v] = x
            if v in self.grads:
                self.sums[v] = self.add(self.sums[v], x) if v in self.sums else x
            elif v in self.stages.home:
                self.results[microbatch][v] = x
        for to, values in self.stages.sent(*part):
            if to in self.own:
                self.held.setdefault((to, microbatch), {}).update({v: held[v] for v in values})


def joined(each: Sequence[Tensor], kind: str) -> Tensor:
    """The results of microbatches as one: "rows" one after the other, the "mean" of numbers, or the one that there
    is."""
    match kind:
        case "rows":
            return torch.cat(list(each))
        case "mean":
            return torch.stack(list(each)).mean(0)
    (one,) = each
    return one


# --- all ranks in one process ---------------------------------------------------------------------


class Mailbox:
    """The channel between ranks of one process."""

    def __init__(self) -> None:
        self.letters: dict[Message, Sequence] = {}

    def expect(self, message: Message) -> None:
        pass

    def send(self, message: Message, values: Sequence) -> None:
        self.letters[message] = values

    def take(self, message: Message) -> Sequence | None:
        return self.letters.pop(message, None)


def workers(
    stages: Stages, schedule: Schedule, execute: Execute, add: Callable, grads: Sequence[Value]
) -> list[Worker]:
    """All ranks of a pipeline, with one mailbox."""
    box = Mailbox()
    return [Worker(stages, row, execute, add, box, grads, schedule.split) for row in orders(schedule, stages)]


def together(
    ranks: Sequence[Worker],
    weights: Mapping[Value, object],
    batches: Sequence[Mapping[Value, object]],
    sums: Mapping[Value, object] | None = None,
) -> tuple[list[Env], Env]:
    """Run all ranks; gives results of each microbatch and sums of gradients, whoever has them."""
    running = [worker.run(weights, batches, sums) for worker in ranks]
    while running:
        running = [run for run in running if next(run, True) is None]
    results = [{v: x for w in ranks for v, x in w.results[m].items()} for m in range(len(batches))]
    return results, {v: x for w in ranks for v, x in w.sums.items() if w.stages.home[v] in w.own}
