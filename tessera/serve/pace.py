"""How many tokens of prompts a step may have beside sequences that decode, so that it keeps the time that is asked.

In: how long steps took. Out: tokens. A step is taken to last  base + token * tokens + pair * pairs  seconds, where a
pair is a token and one before it that it looks at: far into a long text, attention takes longer than all else. `base`
is what steps without prompts take. The other two are fitted to the latest steps, by the share of each that they miss:
so a step which took strangely long tells little. Older steps count less. If the latest step took longer than the fit
says, so will the next ones; each that easily keeps the time which is asked takes some of that doubt away. A step of
prompts takes no less than its launch: where it took no longer than the shortest, more tokens fit.
"""

from __future__ import annotations

import math

MARGIN = 0.9  # of the time that is asked: what steps may be expected to take
GROWTH, SURE = 1.5, 64  # a step has at most so many times the tokens of the latest one, or so many
FEWEST, FIRST = 32, 8  # fractions of the budget: what prompts always get, and what they get before anything is known
KEPT = 0.9  # of what was known, after another step
TOLD = 0.25  # of the time that is asked: steps of prompts that should take less tell nothing
EASY = 0.75  # of the time that is asked: one that took less could have had more tokens, whatever was doubted
FLOOR, MORE = 1.05, 0.9  # times the shortest: no longer than it; what such a step is said to have cost, times the fit
FAR, GUESS = 4096, 0.1  # a token looks back so far when it costs twice as much: a guess, and its weight beside a step


class Pace:
    """`budget` tokens a step at most; layers look `reach` tokens back, or to the beginning."""

    def __init__(self, budget: int, seconds: float, reach: float = math.inf):
        self.budget, self.seconds, self.reach = budget, seconds, reach
        self.least = max(1, budget // FEWEST)
        self._base = self._token = self._pair = 0.0
        self._shortest = math.inf  # of steps with prompts beside others
        self._late = 1.0  # how many times as long as the fit says the latest step took
        self._measured = 0  # tokens of prompts in it
        self._sums = [0.0] * 5  # of the fit

    @property
    def room(self) -> float:
        """Seconds that prompts may take in a step beside others."""
        return (MARGIN * self.seconds - self._base) / self._late

    def pairs(self, first: int, count: int) -> float:
        """Of `count` tokens from the position `first` on."""
        return count * min(self.reach, first + count / 2)

    def cost(self, first: int, count: int) -> float:
        return self._token * count + self._pair * self.pairs(first, count)

    def tokens(self, first: int, room: float) -> int:
        """How many tokens from the position `first` on take no more than `room` seconds."""
        if not self._measured:
            return max(1, self.budget // FIRST)
        if room <= 0:
            return 0
        each = self._token + self._pair * min(self.reach, first)
        growing = self._pair if first < self.reach else 0.0
        count = 2 * room / (each + math.sqrt(each * each + 2 * growing * room))
        return int(min(count, max(GROWTH * self._measured, SURE)))

    def took(self, seconds: float, decodes: bool, prompts: list[tuple[int, int]]) -> None:
        """A step of such prompts (first position, tokens) took so long; `decodes`: it had other sequences besides."""
        tokens, pairs = sum(n for _, n in prompts), sum(self.pairs(*prompt) for prompt in prompts)
        if not tokens:
            self._base += (min(seconds, self.seconds / 2) - self._base) / 4
            return
        expected = self._token * tokens + self._pair * pairs
        if seconds <= self.seconds and 0 < expected < TOLD * self.seconds:
            self._measured = max(self._measured, tokens)
            if seconds <= EASY * self.seconds:
                self._late = math.sqrt(self._late)
            return
        took = max(seconds - self._base * decodes, seconds / 2)
        if decodes:
            self._shortest = min(self._shortest, seconds)
            if expected and took > MORE * expected and seconds <= FLOOR * self._shortest:
                took = MORE * expected
        rate = tokens / took
        terms = rate**2, rate**2 * pairs / tokens, (rate * pairs / tokens) ** 2, rate, rate * pairs / tokens
        guess = (GUESS * rate) ** 2
        prior = guess, -guess * FAR, guess * FAR**2, 0.0, 0.0  # pair * FAR = token
        self._sums = [KEPT * old + new + more for old, new, more in zip(self._sums, terms, prior, strict=True)]
        self._fit()
        self._late = max(1.0, took / (self._token * tokens + self._pair * pairs))
        self._measured = tokens

    def _fit(self) -> None:
        """Least squares of  token * tokens / took + pair * pairs / took  against 1; neither is below 0."""
        tt, tp, pp, t, p = self._sums
        determinant = tt * pp - tp * tp
        self._token, self._pair = t / tt, 0.0
        if determinant > 1e-6 * tt * pp and (pair := (p * tt - t * tp) / determinant) > 0:
            token = (t * pp - p * tp) / determinant
            self._token, self._pair = (token, pair) if token > 0 else (0.0, p / pp)
