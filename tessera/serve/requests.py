"""What goes in and out of the engine: a request, its pieces as they come, and its answers in the end.

In: tokens that the runner took for each answer. Out: pieces of text, each answer with exactly one end. Reasons to end:
`stop` (an end token or a stop text), `length`, `cancelled`, `deadline`, `error`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tessera.serve.guide import Guide
from tessera.serve.runner import Logprob, Taken
from tessera.serve.sampling import Draw, Sampling
from tessera.serve.scheduler import Answer, Work
from tessera.serve.text import Text


class Piece(NamedTuple):
    """News of one answer. `finish` stands in its last piece alone."""

    index: int  # which of the n answers
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish: str | None = None
    error: str | None = None


@dataclass
class Completion:
    """One whole answer."""

    prompt: list[int]
    index: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob | None] | None = None  # None for the first token, which nothing foretells
    finish: str | None = None
    error: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.finish, self.error = piece.finish or self.finish, piece.error or self.error


class Request:
    """A prompt, its settings and the answers in the making."""

    def __init__(
        self, prompt: Sequence[int], settings: Sampling, ends: Sequence[int], seed: int,
        decode: Callable[[Sequence[int]], str] | None, arrival: float, guides: Sequence[Guide] = (),
    ):  # fmt: skip
        self.prompt, self.settings, self.seed, self.arrival = list(prompt), settings, seed, arrival
        self.ends = frozenset((() if settings.ignore_eos else tuple(ends)) + tuple(settings.stop_tokens))
        self.answers: list[Answer] = []
        self.pieces: deque[Piece] = deque()
        self.prompt_logprobs: dict[int, Logprob] = {}
        self.begun = False  # some step has computed a part of it
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._texts = [Text(decode, settings.stop) if decode is not None else None for _ in range(settings.n)]
        self._guides = [*guides] or [None] * settings.n
        self._draws = [Draw(settings, seed, index, self.prompt) for index in range(settings.n)]
        self.left = settings.n  # answers that have not ended

    def draw(self, work: Work, guess: int) -> Draw:
        """What the row after a work's i-th guess asks for."""
        answer, settings = work.sequence, self.settings
        usual, guide = self._draws[answer.index], self._guides[answer.index]
        early = work.end - work.drafted + guess - answer.prompt < settings.min_tokens
        if not early and not settings.penalises and guide is None:
            return usual
        guesses = work.tokens[len(work.tokens) - work.drafted :][:guess]
        output = [*answer.tokens[answer.prompt :], *guesses] if settings.penalises else ()
        banned = tuple(sorted(self.ends)) if early else ()
        return replace(usual, output=output, banned=banned, guide=guide, guesses=guesses)

    def possible(self, answer: Answer, guesses: list[int]) -> list[int]:
        """Guesses, as far as the answer may go on with them."""
        guide = self._guides[answer.index]
        return guesses if guide is None else guesses[: guide.follows(guesses)]

    def fault(self, answer: Answer) -> str:
        """Why no token could be chosen."""
        told = getattr(self._guides[answer.index], "error", None)
        return told or "the model's logits are not numbers, or no token is left to choose"

    def most_prompt(self, work: Work) -> int | None:
        """Of how many tokens the prompt's log-probabilities are still asked: the first answer brings them."""
        return self.settings.prompt_logprobs if work.sequence is self.answers[0] else None

    def take(self, taken: Taken) -> str | None:
        """New tokens of an answer: its text goes out, and why it ends, if it does, comes back."""
        if taken.prompt_logprobs:
            self.prompt_logprobs.update(taken.prompt_logprobs)
        if not taken.work.samples:
            return None
        index = (answer := taken.work.sequence).index
        writer, guide, kept, text, why = self._texts[index], self._guides[index], [], "", None
        room = answer.max_tokens - (before := len(answer.tokens) - answer.prompt)
        for token in taken.tokens[:room]:
            if token < 0:
                why = "error"
                break
            kept.append(token)
            whole = guide is not None and guide.take(token)
            if guide is not None and guide.error is not None:
                why = "error"
                break
            if token not in self.ends and writer is not None:
                text += writer.push(token, early=before + len(kept) <= self.settings.min_tokens)
                whole = whole or writer.stopped is not None
            if whole or token in self.ends:
                why = "stop"
                break
        if why is None and len(kept) == room:
            why = "length"
        self.pieces.append(Piece(index, text, tuple(kept), tuple(taken.logprobs[: len(kept)])))
        taken.tokens[:] = kept
        return why

    def end(self, answer: Answer, why: str, error: str | None = None) -> None:
        """An answer's last piece."""
        text = self._texts[answer.index]
        self.pieces.append(Piece(answer.index, text.finish() if text is not None else "", finish=why, error=error))
        self.left -= 1  # last: whoever sees that none is left finds the last piece

    def completions(self, pieces: Sequence[Piece]) -> list[Completion]:
        """The whole answers, put together."""
        asked = self.settings.prompt_logprobs is not None
        listed = [self.prompt_logprobs.get(p) for p in range(len(self.prompt))] if asked else None
        answers = [Completion(self.prompt, index, prompt_logprobs=listed) for index in range(self.settings.n)]
        for piece in pieces:
            answers[piece.index].add(piece)
        return answers
