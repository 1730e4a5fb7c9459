"""Guessing the next tokens by looking them up: what followed the last few tokens when they stood there before.

In: an answer's tokens. Out: tokens that may come next, for the runner to verify. An answer whose guesses fail too often
is not guessed for any more, whoever guesses: here or in `draft.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST, SHORTEST = 3, 1  # tokens at the end that are looked for
TRIES, WORTH = 32, 0.2  # after so many guessed tokens, less than this share of them right means to stop
REACH = 4096  # tokens back that are searched


@dataclass
class Lookup:
    """Guesses for one answer, `most` tokens at a time. `worth`: the share that must be right."""

    most: int
    worth: float = WORTH
    guessed: int = 0
    right: int = 0

    @property
    def pays(self) -> bool:
        return self.guessed < TRIES or self.right >= self.worth * self.guessed

    def guess(self, tokens: Sequence[int]) -> list[int]:
        if not self.pays:
            return []
        recent = list(tokens[-REACH:])
        for length in range(min(LONGEST, len(recent) - 1), SHORTEST - 1, -1):
            wanted = recent[-length:]
            for start in range(len(recent) - length - 1, -1, -1):
                if recent[start : start + length] == wanted:
                    return recent[start + length : start + length + self.most]
        return []

    def learn(self, guessed: int, right: int) -> None:
        self.guessed += guessed
        self.right += right
