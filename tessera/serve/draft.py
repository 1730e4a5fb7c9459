"""Guessing the next tokens by a smaller model, the draft.

In: a step's works, with places held free for guesses. Out: the same works with tokens in those places, for the runner
to verify. The draft has pools of its own behind the same tables, and sees every token that the model sees, so reuse,
copies and preemption need no books of their own. What it guesses never changes an answer: it only decides how many
tokens a step gives.

The draft draws as the model will: by the same settings, grammar and random number. So where both would give a token
nearly the same probability, they draw the same one, at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tessera.serve.programs import Paged, Programs, groups_of, kept_as
from tessera.serve.sampling import Draw, choose, guided, rows_of
from tessera.serve.scheduler import Batch, Work
from tessera.util.errors import OptionError


def check_draft(draft: Paged, model: Paged, longest: int | None) -> None:
    """Refuse a draft whose tokens, pools or tables are not the model's, or whose positions are fewer."""
    if draft.longest is not None and draft.longest < (longest or 2**62):
        raise OptionError(
            f"draft: it has {draft.longest} positions; expected longest={draft.longest} or less, got {longest}"
        )
    told = {
        "vocabulary": (model.vocabulary, draft.vocabulary),
        "windows of attention": (groups_of(model.layers()), groups_of(draft.layers())),
        "device and dtype": (kept_as(model), kept_as(draft)),
    }
    for what, (wanted, got) in told.items():
        if wanted != got:
            raise OptionError(f"draft: expected the model's {what}, {wanted}, got {got}")


class Drafter:
    """`draw_of(work, i)` says what the row after the i-th guess of a work asks for."""

    def __init__(self, programs: Programs, draw_of: Callable[[Work, int], Draw]):
        self.programs, self.draw_of = programs, draw_of

    @torch.no_grad()
    def fill(self, batch: Batch, wanted: Callable[[Work], bool]) -> list[Work]:
        """The works with guesses. The draft sees the tokens of those that are `wanted`, also where it does not guess:
        later guesses need them."""
        for copy in batch.copies:
            self.programs.copy(*copy)
        held = {work.sequence: work.drafted for work in batch.works}
        done = {work.sequence: _known(work) for work in batch.works}
        seen = [work for work in done.values() if wanted(work)]
        while seen:
            drawn = self._drawn(seen, [work for work in seen if held[work.sequence]])
            seen = []
            for work, token in drawn:
                if token < 0:
                    continue  # nothing to guess
                more = replace(work, tokens=(*work.tokens, token), drafted=work.drafted + 1)
                done[work.sequence] = more
                if more.drafted < held[work.sequence]:
                    seen.append(more)
        return [done[work.sequence] for work in batch.works]

    def _drawn(self, works: Sequence[Work], guessing: Sequence[Work]) -> list[tuple[Work, int]]:
        """The next token of those that guess."""
        fed = [_fed(work) for work in works]
        ends, at = {}, 0
        for work, part in zip(works, fed, strict=True):
            at += len(part.tokens)
            ends[work.sequence] = at - 1
        rows = [ends[work.sequence] for work in guessing]
        name, given = self.programs.fill(fed, rows or [0])
        logits = self.programs.run(name, given)[: len(rows)]
        if not rows:
            return []
        draws = [self.draw_of(work, work.drafted) for work in guessing]
        rows_asked = rows_of(draws, [work.end for work in guessing], logits.device)
        tokens = choose(logits, guided(rows_asked, draws, logits.device)).tolist()
        return list(zip(guessing, tokens, strict=True))


def _known(work: Work) -> Work:
    """The work without the places that are held free."""
    return replace(work, tokens=work.tokens[: len(work.tokens) - work.drafted], drafted=0)


def _fed(work: Work) -> Work:
    """What the draft has not seen of a work. The last guess of the step before may be news to it: it was drawn, and
    never fed."""
    if work.drafted:
        return replace(work, first=work.end - 1, tokens=work.tokens[-1:])
    first = max(0, work.first - 1)
    return replace(work, first=first, tokens=(*work.sequence.tokens[first : work.first], *work.tokens))
