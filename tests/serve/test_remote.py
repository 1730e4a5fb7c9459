"""The engine as the server sees it: what is under way, and what is refused without asking."""

from __future__ import annotations

import asyncio

import pytest

from tessera.serve.http.remote import EngineError, Remote
from tessera.serve.http.wire import Message

SUBMIT: Message = {"op": "submit", "settings": {"n": 2}}


async def settled() -> None:
    """Everybody has come as far as he can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_full_engine_is_not_asked() -> None:
    async def play() -> None:
        remote, told = Remote({}), list[Message]()
        remote._tell = told.append  # type: ignore[method-assign]
        remote._take({"op": "ready", "longest": 64, "room": 3})
        first = asyncio.create_task(anext(remote.messages(SUBMIT)))
        await settled()
        with pytest.raises(EngineError, match="2 sequences are waiting or computed; at most 3 may") as raised:
            await anext(remote.messages(SUBMIT))
        assert raised.value.status == 429 and len(told) == 1
        asked = asyncio.create_task(remote.ask({"op": "tokenize"}))  # takes nobody's place
        await settled()
        remote._take({"op": "answer", "id": 2, "tokens": [1]})
        assert (await asked)["tokens"] == [1]
        for index in range(2):  # both answers end, though nobody has read them yet: there is room again
            remote._take({"op": "piece", "id": 1, "index": index, "finish": "length"})
        second = asyncio.create_task(anext(remote.messages(SUBMIT)))
        await settled()
        assert [message["op"] for message in told] == [
            "submit",
            "tokenize",
            "submit",
        ]  # what has ended is not cancelled
        assert (await first)["index"] == 0
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert told[-1] == {"op": "cancel", "id": 3}

    asyncio.run(play())
