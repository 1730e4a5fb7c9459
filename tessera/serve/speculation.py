"""Who guesses the next tokens of which answer: a draft model where there is one, else what stood in the text before.

In: answers that run. Out: guesses for the runner to verify. An answer whose guesses are too seldom right is not guessed
for any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tessera.serve.draft import Drafter
from tessera.serve.lookup import WORTH, Lookup
from tessera.serve.requests import Request
from tessera.serve.scheduler import Answer, Batch, Work

DRAFT_WORTH = 0.4  # the share that must be right where a model guesses, which takes time


class Speculation:
    """At most `most` tokens a step and answer."""

    def __init__(self, most: int, drafter: Drafter | None = None):
        self.most, self.drafter = most, drafter
        self._lookups: dict[int, Lookup] = {}

    def begin(self, answer: Answer) -> None:
        if self.most:
            self._lookups[answer.id] = Lookup(self.most, WORTH if self.drafter is None else DRAFT_WORTH)

    def end(self, answer: Answer) -> None:
        self._lookups.pop(answer.id, None)

    def guess(self, running: Iterable[Answer], owner: Mapping[int, Request]) -> None:
        """Give answers their guesses; with a draft, so many places for it to fill once blocks are found."""
        for answer in running if self.most else ():
            left = answer.max_tokens - (len(answer.tokens) - answer.prompt) - 1
            lookup = self._lookups[answer.id]
            if answer.left != 1:
                answer.draft = []
            elif self.drafter is not None:
                answer.draft = [0] * min(left, self.most) if lookup.pays else []
            else:
                answer.draft = owner[answer.id].possible(answer, lookup.guess(answer.tokens)[:left])

    def fill(self, batch: Batch) -> None:
        """Let the draft fill the places that were found."""
        if self.drafter is not None:
            batch.works = self.drafter.fill(batch, lambda work: self._lookups[work.sequence.id].pays)

    def learn(self, work: Work, right: int) -> None:
        self._lookups[work.sequence.id].learn(work.drafted, right)
