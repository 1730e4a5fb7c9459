"""Who may ask, and how much at once: keys, bodies, requests under way. And the log of who asked.

Keys are kept and compared as digests, in constant time, and never written anywhere; nor are prompts.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256

from tessera.serve.http.errors import HttpError


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


class Guard:
    """`keys` may ask, or anybody where there are none; `most` requests of one key, or client, run at once."""

    def __init__(self, keys: Sequence[str], most: int):
        self._digests, self.most = [digest(key) for key in keys], most
        self._running: Counter[str] = Counter()

    def who(self, headers: Mapping[str, str], client: str) -> str:
        """Whose request it is: a key's digest, or the client's address."""
        if not self._digests:
            return client
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._digests]  # all of them, whichever it is
        if scheme.lower() != "bearer" or not any(matches):
            raise HttpError("expected a known key: Authorization: Bearer KEY", status=401, code="invalid_api_key")
        return given

    @contextmanager
    def enter(self, who: str) -> Iterator[None]:
        """Count a request while it is under way."""
        if self._running[who] >= self.most:
            raise HttpError(f"{self.most} requests are under way already", status=429, code="too_many_requests")
        self._running[who] += 1
        try:
            yield
        finally:
            self._running[who] -= 1
            if not self._running[who]:
                del self._running[who]


async def body_of(headers: Mapping[str, str], stream: AsyncIterable[bytes], most: int, seconds: float) -> object:
    """The body as JSON, never more of it than may be, nor waited for longer."""
    too_large = HttpError(f"expected a body of at most {most} bytes", status=413, code="body_too_large")
    if (stated := headers.get("content-length", "0")).isdecimal() and int(stated) > most:
        raise too_large
    if (coding := headers.get("content-encoding", "identity")) != "identity":
        raise HttpError(f"expected a body as it is, got content-encoding: {coding[:40]}", status=415)
    read = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in stream:
                read.extend(part)
                if len(read) > most:
                    raise too_large
    except TimeoutError:
        raise HttpError(f"expected the whole body within {seconds:g} s", status=408, code="body_too_slow") from None
    try:
        body = json.loads(read.decode("utf-8-sig"))
        if b"\\ud" in read.lower():  # an escape may stand for half a character, which is no text
            json.dumps(body, ensure_ascii=False).encode()
        return body
    except (ValueError, RecursionError) as error:
        raise HttpError(f"expected JSON: {type(error).__name__}: {error}"[:200]) from None


def log_access(fields: Mapping[str, object]) -> None:
    """One line of JSON a request, on standard error."""
    sys.stderr.write(json.dumps({"time": round(time.time(), 3), **fields}) + "\n")
