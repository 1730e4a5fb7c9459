"""The answers to one request, as they come: for `for`, for `async for`, or whole.

In: a request that an engine has taken. Out: its pieces, in order. Whoever reads drives the engine. A stream that is
left before its end, or dropped, cancels its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from tessera.serve.requests import Completion, Piece, Request

if TYPE_CHECKING:
    from types import TracebackType


class Driver(Protocol):
    """What a stream asks of an engine."""

    def drive(self, until: Callable[[], bool]) -> None: ...

    def cancel(self, request: Request) -> None: ...

    def forsake(self, request: Request) -> None: ...


class Stream:
    """One request's pieces."""

    def __init__(self, engine: Driver, request: Request):
        self.engine, self.request = engine, request
        self._open = True

    def _ready(self) -> bool:
        return bool(self.request.pieces) or not self.request.left

    def _next(self) -> Piece | None:
        if self.request.pieces:
            return self.request.pieces.popleft()
        self._open = False
        return None

    # --- for ---

    def __iter__(self) -> Iterator[Piece]:
        try:
            while True:
                while not self._ready():
                    self.engine.drive(self._ready)
                piece = self._next()
                if piece is None:
                    return
                yield piece
        finally:
            self.close()

    def whole(self) -> list[Completion]:
        """All answers, when they have ended."""
        return self.request.completions(list(self))

    # --- async for ---

    async def _pieces(self) -> AsyncIterator[Piece]:
        try:
            while True:
                while not self._ready():
                    await asyncio.to_thread(self.engine.drive, self._ready)
                piece = self._next()
                if piece is None:
                    return
                yield piece
        finally:
            self.close()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces()

    # --- leaving ---

    def close(self) -> None:
        """Cancel what has not ended."""
        if self._open:
            self._open = False
            self.engine.cancel(self.request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open:
            self.engine.forsake(self.request)
