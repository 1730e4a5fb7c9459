"""The answers to one request, as they come: for `for`, for `async for`, or whole.

In: a request that an engine has taken. Out: its pieces, in order. Whoever reads drives the engine. A stream that is
left before its end, or dropped, cancels its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from tessera.serve.requests import Completion, Piece, Request

if TYPE_CHECKING:
    from tessera.serve.engine import Engine


class Stream:
    """One request's pieces."""

    def __init__(self, engine: Engine, request: Request):
        self.engine, self.request = engine, request
        self._open = True

    def _ready(self) -> bool:
        return bool(self.request.pieces) or not self.request.left

    def _wait(self) -> None:
        """Until there is another piece, or the end."""
        while not self._ready():
            self.engine.drive(self._ready)

    def _next(self) -> Piece | None:
        """The next piece, when it has come; None after the last one."""
        self._wait()
        if self.request.pieces:
            return self.request.pieces.popleft()
        self._open = False
        return None

    def __iter__(self) -> Iterator[Piece]:
        try:
            while (piece := self._next()) is not None:
                yield piece
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while True:
                if not self._ready():
                    await asyncio.to_thread(self._wait)
                if (piece := self._next()) is None:
                    return
                yield piece
        finally:
            self.close()

    def whole(self) -> list[Completion]:
        """All answers, when they have ended."""
        return self.request.completions(list(self))

    def close(self) -> None:
        """Cancel what has not ended."""
        if self._open:
            self._open = False
            self.engine.cancel(self.request)

    def __del__(self) -> None:
        if self._open:
            self.engine.forsake(self.request)
