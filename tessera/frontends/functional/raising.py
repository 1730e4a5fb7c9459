"""A Python `if` on a tensor, of which one side raises at once, is a check: `if (x < 0).any(): raise …`, `assert …`.

In: a function that traces a program, and is called again from the start. Out: its trace, in which each such question is
an equation `tessera.raise_if(asked, answer, …)` with the error that eager would raise. A side raises at once if it does
so before it computes anything. What both sides go on from stays a question that only a run could answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from tessera.frontends.functional.trace import ASKS_A_VALUE, WATCHED, tracing
from tessera.ir.check import KINDS, RAISE_IF
from tessera.ir.record import recording
from tessera.torch_internals.autograd import TensorBase
from tessera.torch_internals.fake import FakeTensor
from tessera.util.errors import CaptureError

T = TypeVar("T")
ADDRESS = re.compile("0x[0-9a-f]+")
MOST = 100  # questions of one program


@dataclass(frozen=True)
class Answer:
    """The side that goes on, and what the other one raises; None while that is being tried."""

    says: bool
    raised: Exception | None = None


@dataclass
class Asking:
    """One pass over a program: answers to its first questions, in their order."""

    answers: list[Answer]
    asked: int = 0
    last: Callable[[], int] = field(default=lambda: -1)  # how many equations there are now
    equations: int = -1  # how many there were at the last question that has an answer
    unanswered: bool = False  # a question came that has none


_asking: list[Asking] = []


def with_checks(trace: Callable[[], T]) -> T:
    """What `trace` gives, with answers to as many questions as have one side that raises."""
    answers: list[Answer] = []
    while True:
        with _answering(answers) as asking:
            try:
                return trace()
            except CaptureError:
                if not asking.unanswered or len(answers) == MOST:
                    raise
                found = _answer(trace, answers)
                if found is None:
                    raise
        answers.append(found)


def _answer(trace: Callable[[], object], known: list[Answer]) -> Answer | None:
    for says in (True, False):
        error = _raised_at_once(trace, [*known, Answer(says)])
        if error is not None:
            return Answer(not says, error)
    return None


def _raised_at_once(trace: Callable[[], object], answers: list[Answer]) -> Exception | None:
    with _answering(answers) as asking:
        try:
            trace()
        except tuple(KINDS.values()) as error:
            if type(error).__name__ in KINDS and asking.asked == len(answers) and asking.last() == asking.equations:
                return error
        except CaptureError:
            pass
    return None


@contextmanager
def _answering(answers: list[Answer]) -> Iterator[Asking]:
    _asking.append(Asking(answers))
    try:
        yield _asking[-1]
    finally:
        _asking.pop()


def _watched(_: object) -> Callable:
    original = TensorBase.__bool__

    def asks(self: torch.Tensor) -> bool:
        recorder = recording()
        if not _asking or not isinstance(self, FakeTensor) or recorder is None or not tracing():
            return original(self)
        try:
            return original(self)  # what no argument decides is known
        except ASKS_A_VALUE:
            asking = _asking[-1]
            if asking.asked == len(asking.answers) or self.numel() != 1:
                asking.unanswered = self.numel() == 1
                raise
        answer, builder = asking.answers[asking.asked], recorder.builder
        asking.asked += 1
        if answer.raised is not None:
            told = ADDRESS.sub("…", str(answer.raised))  # all ranks write the same program
            value, kind = recorder.value(self), type(answer.raised).__name__
            builder.record(RAISE_IF, (value, not answer.says, told, kind), {}, [])
        asking.last = lambda: len(builder.equations)
        asking.equations = len(builder.equations)
        return answer.says

    return asks


WATCHED.append((torch.Tensor, "__bool__", _watched))
