"""A step on the device: copies of blocks, one program, the next tokens.

In: a `Batch`, and for every sequence that samples what it asks of its next tokens. Out: a `Flight`, and when it has
landed a `Taken` for each work. `launch` waits for nothing: tokens that the flight before has drawn are read where they
lie, on the device, and one asynchronous copy brings new ones out. `land` waits for that copy. Tokens that were guessed
are verified here: each of them is drawn as ever, and the guesses are kept as far as they are what was drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tessera.serve.programs import Programs
from tessera.serve.sampling import Draw, Rows, choose, guided, logprobs, rows_of
from tessera.serve.scheduler import Answer, Batch, Work

Moment = float | torch.cuda.Event  # by the host's clock, or in the device's own order


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability, and the likeliest tokens at its place with theirs."""

    token: int
    value: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Taken:
    """What a step gave one sequence: new tokens, `-1` for one that could not be chosen."""

    work: Work
    tokens: list[int]
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: dict[int, Logprob] = field(default_factory=dict)  # by the token's position


@dataclass(slots=True)
class _Row:
    """A row of logits: whose it is, and what it is for."""

    work: int
    position: int  # of the token that these logits are about
    most: int | None  # of how many tokens log-probabilities are asked
    draw: Draw | None = None  # None: a row of the prompt, of which log-probabilities are asked


@dataclass(slots=True)
class _Layout:
    """A step's rows of logits, those that sample first. While the same sequences decode and none of them asks for more
    than a token, the next step has the same ones, a position further."""

    sequences: list[Answer]
    firsts: list[int]  # positions that the step begins at
    rows: list[_Row]
    places: list[int]  # of the rows in the flat row of tokens
    coming: dict[Answer, int]  # the row that gives a sequence its next token
    settings: Rows
    drawn: int  # rows that sample
    steady: bool
    waits: bool  # some next row depends on the tokens that this step gives

    def follows(self, works: Sequence[Work]) -> bool:
        """Are these the works of the next step, and its rows the same?"""
        return (
            self.steady
            and [work.first for work in works] == [first + 1 for first in self.firsts]
            and [work.sequence for work in works] == self.sequences
            and all(work.samples and len(work.tokens) == 1 for work in works)
        )


@dataclass(slots=True)
class Flight:
    """A step under way. `outs` are on their way to the host: tokens, then what log-probabilities consist of."""

    batch: Batch
    start: float
    layout: _Layout | None = None
    outs: tuple[Tensor, ...] = ()
    begun: Moment = 0.0  # when the device could begin, and when it had ended
    done: Moment = 0.0

    @property
    def waits(self) -> bool:
        """Has this flight to land before the next one is launched?"""
        return self.layout is not None and self.layout.waits


class Runner:
    """`draw_of(work, i)` says what the row after the i-th guess of a work asks for, `most_prompt(work)` of how many
    tokens its prompt wants log-probabilities. Where a time between tokens is asked (`hurries`), no prompt is captured
    beside sequences that decode: that takes longer than a step."""

    def __init__(
        self, programs: Programs, draw_of: Callable[[Work, int], Draw], most_prompt: Callable[[Work], int | None],
        hurries: bool = False,
    ):  # fmt: skip
        self.programs, self.draw_of, self.most_prompt, self.hurries = programs, draw_of, most_prompt, hurries
        self._layout: _Layout | None = None

    @torch.no_grad()
    def launch(self, batch: Batch, start: float = 0.0, before: Flight | None = None) -> Flight:
        """Begin a step. `before` is the one that is still under way: unknown tokens are what it draws."""
        for copy in batch.copies:
            self.programs.copy(*copy)
        if not batch.works:
            return Flight(batch, start)
        coming = before.layout.coming if before is not None and before.layout is not None else {}
        layout = self._layout = self._next(batch.works)
        name, given = self.programs.fill(batch.works, layout.places, coming)
        begun = self._moment()
        hasty = self.hurries and name == "mixed" and any(work.decodes for work in batch.works)
        logits = self.programs.run(name, given, not hasty)[: len(layout.rows)]
        settings = layout.settings
        if layout.waits:  # the device computes logits meanwhile
            settings = guided(settings, [row.draw for row in layout.rows if row.draw is not None], logits.device)
        tokens = choose(logits[: layout.drawn], settings)
        torch.clamp(tokens, min=0, out=self.programs.sampled[: layout.drawn])
        outs = tuple(map(_out, (tokens, *self._logprobs(batch.works, logits, tokens))))
        return Flight(batch, start, layout, outs, begun, self._moment())

    def _moment(self) -> Moment:
        if self.programs.device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def land(self, flight: Flight) -> list[Taken]:
        """What a step gave, when it has run."""
        if isinstance(flight.done, torch.cuda.Event):
            flight.done.synchronize()
        if flight.layout is None:
            return []
        tokens, *log = (out.tolist() for out in flight.outs)
        works, rows = flight.batch.works, flight.layout.rows
        if flight.layout.steady:
            return [Taken(work, [token]) for work, token in zip(works, tokens, strict=True)]
        asked = [(i, row) for i, row in enumerate(rows) if row.most is not None]
        logprobs = {
            i: Logprob(token, value, tuple(zip(ids, logs, strict=True))[: row.most])
            for (i, row), token, value, logs, ids in zip(asked, *log, strict=True)
        } if asked else {}  # fmt: skip
        return _handed_out(works, rows, tokens, logprobs)

    def _next(self, works: Sequence[Work]) -> _Layout:
        if self._layout is not None and self._layout.follows(works):
            settings = self._layout.settings.further()
            return replace(self._layout, firsts=[work.first for work in works], settings=settings)
        rows, prompts, coming, start = [], [], {}, 0
        places, more = [], []
        for index, work in enumerate(works):
            known = len(work.tokens) - work.drafted
            if work.samples:
                coming[work.sequence] = len(rows)
                for place in range(known - 1, len(work.tokens)):
                    draw = self.draw_of(work, place + 1 - known)
                    places.append(start + place)
                    rows.append(_Row(index, work.first + place + 1, draw.settings.logprobs, draw))
            last = min(work.end, work.sequence.prompt - 1)
            if work.first < last and (most := self.most_prompt(work)) is not None:
                more += range(start, start + last - work.first)
                prompts += [_Row(index, p + 1, most) for p in range(work.first, last)]
            start += len(work.tokens)
        draws = [row.draw for row in rows]
        positions = [row.position for row in rows]
        return _Layout(
            [work.sequence for work in works], [work.first for work in works], [*rows, *prompts],
            [*places, *more], coming,
            rows_of(draws, positions, self.programs.device), len(rows),
            steady=start == len(works) == len(rows) and not prompts and all(d.lasts for d in draws),
            waits=any(draw.waits for draw in draws),
        )  # fmt: skip

    def _logprobs(self, works: Sequence[Work], logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """Of the rows that ask for it: the token, its log-probability, the highest ones, and whose they are."""
        assert self._layout is not None
        rows = self._layout.rows
        if self._layout.steady or not (asked := [i for i, row in enumerate(rows) if row.most is not None]):
            return ()
        given = [works[row.work].sequence.tokens[row.position] for row in rows if row.draw is None]
        every = torch.cat([tokens, torch.tensor(given, dtype=torch.int64, device=tokens.device)])
        width = min(logits.shape[1], max(rows[i].most or 0 for i in asked))
        picked = torch.tensor(asked, device=logits.device)
        return every[picked], *logprobs(logits[picked], every[picked], width)


def between(before: Moment, after: Moment) -> float:
    """Seconds from one moment to a later one, both of which have been."""
    if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
        return before.elapsed_time(after) / 1e3
    return after - before  # type: ignore[operator]


def _out(tensor: Tensor) -> Tensor:
    """A copy on the host, which is there when the device has come so far."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _handed_out(works: Sequence[Work], rows: Sequence[_Row], tokens: list[int], log: dict[int, Logprob]) -> list[Taken]:
    """Give every work its tokens, as far as its guesses are what was drawn."""
    taken = [Taken(work, []) for work in works]
    for i, row in enumerate(rows):
        mine, work = taken[row.work], works[row.work]
        if row.draw is None:
            mine.prompt_logprobs[row.position] = log[i]
            continue
        guess = len(mine.tokens)
        guesses = work.tokens[len(work.tokens) - work.drafted :]
        if row.position != work.end - work.drafted + guess or tuple(mine.tokens) != guesses[:guess]:
            continue  # a guess before it was wrong
        mine.tokens.append(tokens[i])
        if i in log:
            mine.logprobs.append(log[i])
    return taken
