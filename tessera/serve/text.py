"""Text of an answer as its tokens come: no broken characters, and nothing of a text that stops it.

In: tokens one by one. Out: pieces of text. A piece is held back while it ends in a character of which bytes are
missing, or in what may become a stop text. The pieces together are the answer up to the first stop text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character yet
_CONTEXT = 6  # tokens that a decoder sees before a new one, at least: some put spaces by what comes before


class Text:
    """`decode` gives the text of a list of tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()):
        self._decode, self._stops = decode, tuple(stops)
        self._tokens: list[int] = []
        self._told = 0  # tokens whose text is known
        self._ends = deque([0])  # characters end after so many tokens: the first of them is where context begins
        self._held = ""  # text that may become a stop text
        self.stopped: str | None = None

    def push(self, token: int, early: bool = False) -> str:
        """One more token: the text that is certain now. No stop text counts that is there `early`."""
        self._tokens.append(token)
        news = self._news(last=False)
        return news if early else self._release(news, last=False)

    def finish(self) -> str:
        """No token comes any more: the rest."""
        return self._release(self._news(last=True), last=True)

    def _news(self, last: bool) -> str:
        """Text of the tokens that were not told, unless it ends within a character."""
        if self._told == len(self._tokens):
            return ""
        start = self._ends[0]
        before = self._decode(self._tokens[start : self._told])
        text = self._decode(self._tokens[start:])
        if text.endswith(BROKEN) and not last:
            return ""
        # Of tokens that are single bytes a decoder may write all anew if one is wrong: what was told stays told.
        news = text[len(before) :] if text.startswith(before) else self._decode(self._tokens[self._told :])
        self._told = len(self._tokens)
        self._ends.append(self._told)
        while self._ends[1] <= self._told - _CONTEXT:
            self._ends.popleft()
        return news

    def _release(self, news: str, last: bool) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + news
        if places := [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]:
            place, self.stopped = min(places)
            self._held = ""
            return text[:place]
        keep = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are a beginning of the stop text."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
