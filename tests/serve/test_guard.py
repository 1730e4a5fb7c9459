"""Bodies are read as far as they may be large, and as long as they may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tessera.serve.http.errors import HttpError
from tessera.serve.http.guard import body_of


async def sent(parts: Sequence[bytes], ends: bool) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if not ends:
        await asyncio.Event().wait()  # the rest never comes


@pytest.mark.parametrize(
    ("parts", "ends", "status", "told"),
    [
        ([b'{"a"', b": 1"], False, 408, "the whole body within 0.01 s"),
        ([], False, 408, "the whole body"),
        ([b'"', b"x" * 99], False, 413, "at most 64 bytes"),
        ([b'{"a"', b": 1"], True, 400, "expected JSON"),
        ([b'"\\ud800"'], True, 400, "surrogates"),
        ([b'"\xed\xa0\x80"'], True, 400, "utf-8"),  # the same half of a character, written out
        (['"größer"'.encode("utf-16")], True, 400, "utf-8"),
    ],
)
def test_a_body_that_is_late_large_or_wrong_is_refused(parts: list[bytes], ends: bool, status: int, told: str) -> None:
    with pytest.raises(HttpError, match=told) as raised:
        asyncio.run(body_of({}, sent(parts, ends), 64, 0.01))
    assert raised.value.status == status


def test_a_body_in_parts() -> None:
    assert asyncio.run(body_of({"content-length": "7"}, sent([b'{"a"', b":1}"], True), 64, 60.0)) == {"a": 1}


def test_a_body_that_is_packed_is_refused_before_it_is_read() -> None:
    with pytest.raises(HttpError, match="as it is, got content-encoding: gzip") as raised:
        asyncio.run(body_of({"content-encoding": "gzip"}, sent([], False), 64, 60.0))
    assert raised.value.status == 415
