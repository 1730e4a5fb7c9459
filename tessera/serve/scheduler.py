"""The scheduler: which tokens of which sequences the next step computes.

In: sequences, with priorities and deadlines. Out: a `Batch` a step, within one budget of tokens: running sequences that
decode first, then prompts in chunks. Where blocks run out, the sequence of the lowest rank gives its own back and is
computed again later.

The next step can be chosen before the tokens of this one are known: `launched` counts them as `pending`, and a `Work`
has `UNKNOWN` in their place until `advance` brings them. Steps are carried out one after another, so a block that is
given back may be written by the next one.

A sequence's rank is its arrival, put forward by `HEAD_START` seconds for each step of priority. Ranks never change, so
whoever waits long enough stands first, and the first always advances: all others give way to it, and `admits` refuses
what does not fit alone. Hence neither deadlock nor starvation. Every sequence that was put ends exactly once.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.serve.cache import Cache, Copy, Table
from tessera.serve.pace import Pace
from tessera.util.errors import InputError

UNKNOWN = -1  # a token that the step before gives
HEAD_START = 10.0  # seconds of waiting that one step of priority is worth
EVEN = 64  # steps of a multiple of so many tokens need no padding


class Refused(InputError):
    """A request that cannot be taken: `retry` says whether it could be later."""

    def __init__(self, why: str, retry: bool = False):
        super().__init__(why)
        self.retry = retry


@dataclass(eq=False, slots=True)
class Answer:
    """One answer in the making: the prompt, what has been generated, and how much of both is in the cache."""

    id: int
    tokens: list[int]
    max_tokens: int
    arrival: float = 0.0
    priority: int = 0
    deadline: float | None = None  # by the clock that `arrival` is read from
    salt: bytes = b""
    reuse: bool = True  # take what is cached of its tokens
    parent: Answer | None = None  # of several answers to one prompt, the one that computes the prompt
    index: int = 0  # which of them it is
    draft: list[int] = field(default_factory=list)  # tokens that may come next, to be verified
    prompt: int = 0  # how many of the tokens were given
    computed: int = 0  # or being computed
    pending: int = 0  # tokens that steps under way will give
    cached: int | None = None  # tokens of the prompt that were found in the cache; None: it has not begun
    table: Table | None = None  # while it runs
    ended: str | None = None  # why

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)

    @property
    def rank(self) -> tuple[float, int]:
        return self.arrival - HEAD_START * self.priority, self.id

    @property
    def left(self) -> int:
        """Tokens that are there, or are coming, and not computed; 0 where they are all that was asked for."""
        length = len(self.tokens) + self.pending
        return length - self.computed if length - self.prompt < self.max_tokens else 0


@dataclass(slots=True)
class Work:
    """A step's part of one sequence: tokens from `first` on."""

    sequence: Answer
    first: int
    tokens: tuple[int, ...]
    samples: bool  # the last token that is there is among them: another one follows
    drafted: int = 0  # so many of the tokens, the last ones, are guesses

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)

    @property
    def decodes(self) -> bool:
        """Is it one token after the last, and guesses?"""
        return self.samples and len(self.tokens) == 1 + self.drafted and self.first >= self.sequence.prompt


@dataclass
class Batch:
    works: list[Work]
    copies: list[Copy]
    expired: list[Answer]  # sequences that the deadline ended

    @property
    def tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works)


class _Plan:
    """A step in the making: what has been given out, and how many tokens are left to give."""

    def __init__(self, budget: int):
        self.works: dict[Answer, Work] = {}
        self.left, self._given = budget, 0
        self._pace: Pace | None = None
        self._room, self._least = 0.0, 0

    def keep(self, pace: Pace | None) -> None:
        """Whatever is added now has to keep this pace, if others are there already."""
        if pace is not None and self.works:
            self._pace, self._room, self._least = pace, pace.room, pace.least

    def most(self, first: int) -> int:
        """How many tokens a sequence may have from this position on."""
        if self._pace is None:
            return self.left
        count = self._pace.tokens(first, self._room)
        if count >= 2 * EVEN:
            count -= (self._given + count) % EVEN
        return min(self.left, max(count, self._least, 0))

    def add(self, work: Work) -> None:
        self.works[work.sequence] = work
        count = len(work.tokens)
        self.left, self._given = self.left - count, self._given + count
        if self._pace is not None:
            self._room -= self._pace.cost(work.first, count)
            self._least -= count

    def drop(self, sequence: Answer) -> None:
        if (work := self.works.pop(sequence, None)) is not None:
            self.left, self._given = self.left + len(work.tokens), self._given - len(work.tokens)


class Scheduler:
    """`budget` tokens and `most_running` sequences a step; `most_waiting` sequences may queue."""

    def __init__(
        self, cache: Cache, budget: int = 2048, most_running: int = 256, most_waiting: int = 4096,
        longest: int | None = None, step_seconds: float | None = None,
    ):  # fmt: skip
        self.cache, self.budget, self.most_running, self.most_waiting = cache, budget, most_running, most_waiting
        self.longest = longest  # what the model's positions allow
        reach = math.inf if 0 in cache.windows else max(cache.windows)
        self._pace = None if step_seconds is None else Pace(budget, step_seconds, reach)
        self.running: list[Answer] = []  # both by rank
        self.waiting: list[Answer] = []
        self.preemptions = 0
        self.reused = 0  # tokens of prompts that were found in the cache

    # --- sequences come and go ---

    def admits(self, prompt: int, most: int, count: int = 1, coming: int = 0) -> None:
        """Refuse sequences that can never run, or for which the queue has no room, with the numbers that say why.
        `coming`: those that were let pass, and that nobody has put yet."""
        if prompt < 1:
            raise Refused("prompt: expected at least one token")
        limits = {"the model's positions": self.longest, "the cache's blocks": self.cache.capacity()}
        told = f"{prompt} tokens of prompt and up to {most} more are {prompt + most}"
        for what, limit in limits.items():
            if limit is not None and prompt + most > limit:
                field = "max_tokens" if prompt < limit else "prompt"
                raise Refused(f"{field}: {told}; {what} hold {limit}")
        if count > self.most_waiting:
            raise Refused(f"n: {count} answers are asked for at once; at most {self.most_waiting} sequences may wait")
        if (waiting := len(self.waiting) + coming) + count > self.most_waiting:
            raise Refused(f"{waiting} sequences are waiting; at most {self.most_waiting} may", retry=True)

    def put(self, sequence: Answer) -> None:
        """Take a sequence that `admits` has let pass."""
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def end(self, sequence: Answer, why: str) -> None:
        """The sequence ends, wherever it is, and leaves nothing behind."""
        assert sequence.ended is None, f"sequence {sequence.id} ended twice: {sequence.ended}, then {why}"
        if sequence.table is not None:
            self._close(sequence)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.ended = why

    def _close(self, sequence: Answer) -> None:
        assert sequence.table is not None
        self.cache.close(sequence.table)
        sequence.table, sequence.computed = None, 0

    def _preempt(self, sequence: Answer) -> None:
        self._close(sequence)
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=lambda s: s.rank)
        self.preemptions += 1

    # --- a step ---

    def schedule(self, now: float = 0.0) -> Batch:
        """What the next step computes."""
        expired = [s for s in (*self.running, *self.waiting) if s.deadline is not None and now >= s.deadline]
        for sequence in expired:
            self.end(sequence, "deadline")
        before, plan, decoding, prompts = self.preemptions, _Plan(self.budget), [], []
        for sequence in self.running:
            if left := sequence.left:
                (decoding if left == 1 else prompts).append(sequence)
        for sequence in decoding:
            table, first = sequence.table, sequence.computed
            if table is not None and plan.left > 0 and not sequence.draft and self.cache.ready(table, first):
                token = sequence.tokens[first] if first < len(sequence.tokens) else UNKNOWN
                plan.add(Work(sequence, first, (token,), True))
            else:
                self._advance_one(sequence, plan)
        plan.keep(self._pace)
        for sequence in prompts:
            self._advance_one(sequence, plan)
        if self.preemptions == before:
            self._admit(plan)
        return Batch(list(plan.works.values()), self.cache.take_copies(), expired)

    def _advance_one(self, sequence: Answer, plan: _Plan) -> None:
        """Give a running sequence its part of the step, if need be at the cost of those that rank below it."""
        while sequence.table is not None and (most := plan.most(sequence.computed)) > 0:
            count = min(sequence.left, most, self.cache.room(sequence.table, sequence.computed))
            if count > 0:
                plan.add(self._work(sequence, count, plan.left))
                return
            victim = self.running[-1]
            plan.drop(victim)
            self._preempt(victim)

    def _work(self, sequence: Answer, count: int, left: int) -> Work:
        assert sequence.table is not None
        first = sequence.computed
        tokens = sequence.tokens[first : first + count]
        tokens += [UNKNOWN] * (count - len(tokens))
        drafts: list[int] = []
        if count == sequence.left and sequence.draft:
            room = self.cache.room(sequence.table, first) - count
            drafts = sequence.draft[: max(0, min(left - count, room))]
        self.cache.grow(sequence.table, first, first + count + len(drafts))
        return Work(sequence, first, (*tokens, *drafts), count == sequence.left, len(drafts))

    def _admit(self, plan: _Plan) -> None:
        """Let waiting sequences run, by rank, while there is budget and the first of them fits."""
        for sequence in list(self.waiting):
            if plan.most(0) <= 0 or len(self.running) >= self.most_running:
                return
            if self._parent_computes(sequence):
                continue
            if sequence.pending:
                return  # it gave way while a step ran: its next token comes first
            table, computed = self._open(sequence)
            # Beside others a sequence starts only if its whole prompt fits: else they would push each other out.
            fits = not self.running or self.cache.fits(table, computed, len(sequence.tokens) + 1)
            count = min(len(sequence.tokens) - computed, plan.most(computed), self.cache.room(table, computed))
            if not fits or count < 1:
                self.cache.close(table)
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.rank)
            sequence.table, sequence.computed = table, computed
            self.reused += computed
            if sequence.cached is None:
                sequence.cached = computed
            plan.add(self._work(sequence, count, plan.left))

    def _parent_computes(self, sequence: Answer) -> bool:
        parent = sequence.parent
        return parent is not None and parent.ended is None and parent.computed < parent.prompt

    def _open(self, sequence: Answer) -> tuple[Table, int]:
        """What a sequence can start from: its parent's blocks, or what is cached of its tokens."""
        parent, computed = sequence.parent, sequence.prompt - 1
        if parent is not None and parent.table is not None and len(sequence.tokens) == sequence.prompt:
            table = self.cache.fork(parent.table, computed)
            if table is not None:
                return table, computed
        return self.cache.open(sequence.tokens if sequence.reuse else (), sequence.salt)

    def launched(self, batch: Batch) -> None:
        """The step is under way, and whatever comes later finds it done."""
        for work in batch.works:
            sequence = work.sequence
            sequence.computed = work.end - work.drafted
            sequence.pending += work.samples
            if len(work.tokens) > 1 or self.cache.due(sequence.table, sequence.computed):  # type: ignore[arg-type]
                self.cache.commit(sequence.table, sequence.tokens, sequence.computed)  # type: ignore[arg-type]

    def advance(self, work: Work, new: Sequence[int] = ()) -> None:
        """The step has run: `new` tokens follow the last known one, the first ones of them as drafted."""
        sequence = work.sequence
        sequence.pending -= work.samples
        sequence.tokens.extend(new)
        if sequence.table is None:
            return  # it gave way while the step ran
        if work.drafted:
            sequence.computed += max(0, len(new) - 1)
        if self.cache.due(sequence.table, sequence.computed):
            self.cache.commit(sequence.table, sequence.tokens, sequence.computed)

    def took(self, seconds: float, batch: Batch) -> None:
        """How long a step took: from that follows how many tokens of prompts the next ones may have."""
        if self._pace is not None:
            prompts = [(work.first, len(work.tokens)) for work in batch.works if not work.decodes]
            self._pace.took(seconds, len(prompts) < len(batch.works), prompts)

    def check(self) -> None:
        """Raise AssertionError where the books are wrong."""
        assert all(s.table is not None and s.ended is None for s in self.running)
        assert all(s.table is None and s.ended is None for s in self.waiting)
        assert all(s.computed <= len(s.tokens) + s.pending for s in self.running)
        assert self.running == sorted(self.running, key=lambda s: s.rank)
        self.cache.check(s.table for s in self.running if s.table is not None)
