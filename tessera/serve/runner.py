"""A step on the device: copies of blocks, one program, the next tokens.

In: a `Batch`, and for every sequence that samples what it asks of its next tokens. Out: a `Taken` for each work. Tokens
that were guessed are verified here: each of them is drawn as ever, and the guesses are kept as far as they are what was
drawn. The one copy from the device brings tokens and log-probabilities to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tessera.serve.programs import Programs
from tessera.serve.sampling import Draw, choose, logprobs, rows_of
from tessera.serve.scheduler import Batch, Work


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability, and the likeliest tokens at its place with theirs."""

    token: int
    value: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Taken:
    """What a step gave one sequence: new tokens, `-1` for one that could not be chosen."""

    work: Work
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: dict[int, Logprob] = field(default_factory=dict)  # by the token's position


@dataclass(frozen=True)
class _Row:
    """A row of logits: whose it is, its place in the flat row of tokens, and what it is for."""

    taken: Taken
    place: int
    draw: Draw | None  # None: a row of the prompt, of which log-probabilities are asked
    position: int  # of the token that these logits are about


class Runner:
    """`draw_of(work, i)` says what the row after the i-th guess of a work asks for."""

    def __init__(self, programs: Programs, draw_of: Callable[[Work, int], Draw]):
        self.programs, self.draw_of = programs, draw_of

    @torch.no_grad()
    def run(self, batch: Batch, most_prompt: Callable[[Work], int | None]) -> list[Taken]:
        """Carry a batch out. `most_prompt` says of how many tokens a prompt wants log-probabilities."""
        for copy in batch.copies:
            self.programs.copy(*copy)
        if not batch.works:
            return []
        rows, taken = self._rows(batch.works, most_prompt)
        name, given = self.programs.fill(batch.works, [row.place for row in rows])
        logits = self.programs.run(name, given)[: len(rows)]
        draws = [row.draw for row in rows if row.draw is not None]
        tokens = choose(logits[: len(draws)], rows_of(draws, logits.device))
        log = self._logprobs(rows, logits, tokens, most_prompt)
        self._hand_out(rows, tokens.tolist(), log)
        return taken

    def _rows(self, works: Sequence[Work], most_prompt: Callable) -> tuple[list[_Row], list[Taken]]:
        """Rows that sample, then rows of prompts."""
        sampling, prompts, taken, start = [], [], [], 0
        for work in works:
            mine = Taken(work)
            taken.append(mine)
            known = len(work.tokens) - work.drafted
            if work.samples:
                for guess in range(work.drafted + 1):
                    place = start + known - 1 + guess
                    sampling.append(_Row(mine, place, self.draw_of(work, guess), work.first + known + guess))
            if most_prompt(work) is not None:
                last = min(work.end, work.sequence.prompt - 1)
                prompts += [_Row(mine, start + p - work.first, None, p + 1) for p in range(work.first, last)]
            start += len(work.tokens)
        return [*sampling, *prompts], taken

    def _logprobs(self, rows: list[_Row], logits: Tensor, tokens: Tensor, most_prompt: Callable) -> dict[int, Logprob]:
        """Log-probabilities of the rows that ask for them, by the row's number."""
        most = [_most(row, most_prompt) for row in rows]
        asked = [i for i, count in enumerate(most) if count is not None]
        if not asked:
            return {}
        given = [row.taken.work.sequence.tokens[row.position] for row in rows if row.draw is None]
        every = torch.cat([tokens, torch.tensor(given, dtype=torch.int64, device=tokens.device)])
        width = min(logits.shape[1], max(count or 0 for count in most))
        picked = torch.tensor(asked, device=logits.device)
        values, top, which = logprobs(logits[picked], every[picked], width)
        found = zip(asked, every[picked].tolist(), values.tolist(), which.tolist(), top.tolist(), strict=True)
        return {
            i: Logprob(token, value, tuple(zip(ids, logs, strict=True))[: most[i]])
            for i, token, value, ids, logs in found
        }

    def _hand_out(self, rows: list[_Row], tokens: list[int], log: dict[int, Logprob]) -> None:
        """Give every work its tokens, as far as its guesses are what was drawn."""
        for i, row in enumerate(rows):
            mine, work = row.taken, row.taken.work
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


def _most(row: _Row, most_prompt: Callable[[Work], int | None]) -> int | None:
    return row.draw.settings.logprobs if row.draw is not None else most_prompt(row.taken.work)
