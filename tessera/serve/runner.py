"""A step on the device: copies of blocks, one program, the next tokens.

In: a `Batch`, and for every sequence that samples what it asks of its next tokens. Out: a `Flight`, and when it has
landed a `Taken` for each work. `launch` waits for nothing: tokens that the flight before has drawn are read where they
lie, on the device, and one asynchronous copy brings new ones out. `land` waits for that copy. Tokens that were guessed
are verified here: each of them is drawn as ever, and the guesses are kept as far as they are what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tessera.serve.programs import Programs
from tessera.serve.sampling import Draw, choose, logprobs, rows_of
from tessera.serve.scheduler import Answer, Batch, Work


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
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: dict[int, Logprob] = field(default_factory=dict)  # by the token's position


@dataclass(slots=True)
class _Row:
    """A row of logits: whose it is, its place in the flat row of tokens, and what it is for."""

    taken: Taken
    place: int
    position: int  # of the token that these logits are about
    most: int | None  # of how many tokens log-probabilities are asked
    draw: Draw | None = None  # None: a row of the prompt, of which log-probabilities are asked


@dataclass(slots=True)
class Flight:
    """A step under way. `outs` are on their way to the host: tokens, then what log-probabilities consist of."""

    batch: Batch
    start: float
    taken: list[Taken] = field(default_factory=list)
    rows: list[_Row] = field(default_factory=list)
    coming: dict[Answer, int] = field(default_factory=dict)  # the row that gives a sequence its next token
    asked: list[int] = field(default_factory=list)  # rows whose log-probabilities somebody wants
    outs: tuple[Tensor, ...] = ()
    done: torch.cuda.Event | None = None

    @property
    def waits(self) -> bool:
        """Does some next row depend on the tokens that this flight gives, so that it has to land first?"""
        return any(row.draw is not None and row.draw.settings.penalises for row in self.rows)


class Runner:
    """`draw_of(work, i)` says what the row after the i-th guess of a work asks for, `most_prompt(work)` of how many
    tokens its prompt wants log-probabilities."""

    def __init__(
        self, programs: Programs, draw_of: Callable[[Work, int], Draw], most_prompt: Callable[[Work], int | None]
    ):
        self.programs, self.draw_of, self.most_prompt = programs, draw_of, most_prompt

    @torch.no_grad()
    def launch(self, batch: Batch, start: float = 0.0, before: Flight | None = None) -> Flight:
        """Begin a step. `before` is the one that is still under way: unknown tokens are what it draws."""
        for copy in batch.copies:
            self.programs.copy(*copy)
        flight = Flight(batch, start)
        if not batch.works:
            return flight
        self._lay_out(flight)
        rows = flight.rows
        name, given = self.programs.fill(batch.works, [row.place for row in rows], before and before.coming)
        logits = self.programs.run(name, given)[: len(rows)]
        draws = [row.draw for row in rows if row.draw is not None]
        settings = rows_of(draws, [row.position for row in rows[: len(draws)]], logits.device)
        tokens = choose(logits[: len(draws)], settings)
        torch.clamp(tokens, min=0, out=self.programs.sampled[: len(draws)])
        flight.outs = tuple(map(_out, (tokens, *self._logprobs(flight, logits, tokens))))
        if logits.is_cuda:
            flight.done = torch.cuda.Event()
            flight.done.record()
        return flight

    def land(self, flight: Flight) -> list[Taken]:
        """What a step gave, when it has run."""
        if flight.done is not None:
            flight.done.synchronize()
        if flight.outs:
            tokens, *log = (out.tolist() for out in flight.outs)
            found = {
                i: Logprob(token, value, tuple(zip(ids, logs, strict=True))[: flight.rows[i].most])
                for i, token, value, logs, ids in zip(flight.asked, *log, strict=True)
            } if log else {}  # fmt: skip
            _hand_out(flight.rows, tokens, found)
        return flight.taken

    def _lay_out(self, flight: Flight) -> None:
        """Rows that sample, then rows of prompts."""
        sampling, prompts, start = flight.rows, [], 0
        for work in flight.batch.works:
            mine, sequence, count = Taken(work), work.sequence, len(work.tokens)
            flight.taken.append(mine)
            known = count - work.drafted
            if work.samples:
                flight.coming[sequence] = len(sampling)
                for guess in range(work.drafted + 1):
                    draw, place = self.draw_of(work, guess), known - 1 + guess
                    sampling.append(_Row(mine, start + place, work.first + place + 1, draw.settings.logprobs, draw))
            last = min(work.end, sequence.prompt - 1)
            if work.first < last and (most := self.most_prompt(work)) is not None:
                prompts += [_Row(mine, start + p - work.first, p + 1, most) for p in range(work.first, last)]
            start += count
        sampling += prompts

    def _logprobs(self, flight: Flight, logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """Of the rows that ask for it: the token, its log-probability, the highest ones, and whose they are."""
        rows = flight.rows
        flight.asked = asked = [i for i, row in enumerate(rows) if row.most is not None]
        if not asked:
            return ()
        given = [row.taken.work.sequence.tokens[row.position] for row in rows if row.draw is None]
        every = torch.cat([tokens, torch.tensor(given, dtype=torch.int64, device=tokens.device)])
        width = min(logits.shape[1], max(rows[i].most or 0 for i in asked))
        picked = torch.tensor(asked, device=logits.device)
        return every[picked], *logprobs(logits[picked], every[picked], width)


def _out(tensor: Tensor) -> Tensor:
    """A copy on the host, which is there when the device has come so far."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _hand_out(rows: Sequence[_Row], tokens: list[int], log: dict[int, Logprob]) -> None:
    """Give every work its tokens, as far as its guesses are what was drawn."""
    for i, row in enumerate(rows):
        mine, work = row.taken, row.taken.work
        if row.draw is None:
            mine.prompt_logprobs[row.position] = log[i]
            continue
        if work.drafted:
            guess = len(mine.tokens)
            guesses = work.tokens[len(work.tokens) - work.drafted :]
            if row.position != work.end - work.drafted + guess or tuple(mine.tokens) != guesses[:guess]:
                continue  # a guess before it was wrong
        mine.tokens.append(tokens[i])
        if i in log:
            mine.logprobs.append(log[i])
