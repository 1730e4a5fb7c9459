"""The engine as the server sees it: what is under way, and what is refused without asking."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading

import pytest

from tessera.serve.http import worker
from tessera.serve.http.errors import HttpError
from tessera.serve.http.remote import BEHIND, Remote
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
        remote._take({"op": "ready", "longest": 64, "running": 1, "waiting": 2})
        first = asyncio.create_task(anext(remote.messages(SUBMIT)))
        await settled()
        with pytest.raises(HttpError, match="2 sequences are waiting or computed; at most 3 may") as raised:
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
        assert (await first)[1]["index"] == 0
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert told[-1] == {"op": "cancel", "id": 3}

    asyncio.run(play())


def test_what_the_queue_can_never_hold_names_the_field() -> None:
    async def play() -> None:
        remote = Remote({})
        remote._take({"op": "ready", "longest": 64, "running": 8, "waiting": 3})
        for asked, field in (([{"op": "submit", "settings": {"n": 4}}], "n"), ([SUBMIT, SUBMIT], "prompt")):
            with pytest.raises(HttpError, match=f"{field}: 4 answers are asked for at once; at most 3") as raised:
                await anext(remote.messages(*asked))
            assert raised.value.status == 400 and raised.value.param == field

    asyncio.run(play())


def test_prompts_of_one_request_share_its_queue_and_its_end() -> None:
    async def play() -> None:
        remote, told = Remote({}), list[Message]()
        remote._tell = told.append  # type: ignore[method-assign]
        remote._take({"op": "ready", "longest": 64, "running": 1, "waiting": 4})
        with pytest.raises(HttpError, match="6 answers are asked for at once; at most 4"):  # all of it, or nothing
            await anext(remote.messages(SUBMIT, SUBMIT, SUBMIT))
        messages = remote.messages(SUBMIT, SUBMIT)
        first = asyncio.create_task(anext(messages))
        await settled()
        one, two = (message["id"] for message in told)
        remote._take({"op": "piece", "id": two, "index": 1, "finish": "stop"})
        for index in range(2):
            remote._take({"op": "piece", "id": one, "index": index, "finish": "length"})
        found = [await first, await anext(messages), await anext(messages)]
        assert [(place, message["index"]) for place, message in found] == [(1, 1), (0, 0), (0, 1)]
        await messages.aclose()
        assert told[2:] == [{"op": "cancel", "id": two}] and not remote._calls  # `one` has ended

    asyncio.run(play())


def test_who_reads_too_slowly_is_cancelled() -> None:
    async def play() -> None:
        remote, told = Remote({}), list[Message]()
        remote._tell = told.append  # type: ignore[method-assign]
        remote._take({"op": "ready", "longest": 64, "running": 1, "waiting": 3})
        messages = remote.messages(SUBMIT, {**SUBMIT, "settings": {"n": 1}})
        first = asyncio.create_task(anext(messages))
        await settled()
        for _ in range(2 * BEHIND + 10):  # nobody reads on
            remote._take({"op": "piece", "id": 1, "index": 0, "finish": None})
        assert [message["op"] for message in told] == ["submit", "submit", "cancel", "cancel"] and not remote._calls
        await first
        with pytest.raises(HttpError, match="read too slowly") as raised:
            async for _ in messages:
                pass
        assert raised.value.status == 503

    asyncio.run(play())


def test_a_server_that_stops_tells_those_who_wait() -> None:
    """Those who are computed, and those who wait for an engine."""

    async def play() -> None:
        for ready in (True, False):
            remote = Remote({})
            if ready:
                remote._take({"op": "ready", "longest": 64, "running": 1, "waiting": 3})
            asked = asyncio.create_task(anext(remote.messages(SUBMIT)))
            await settled()
            remote.stop()
            with pytest.raises(HttpError, match="the server stops") as raised:
                await asked
            assert raised.value.status == 503

    asyncio.run(play())


HANGS = """
import json, socket, struct, sys, time
sock = socket.socket(fileno=int(sys.argv[1]))
def say(**message):
    body = json.dumps(message).encode()
    sock.sendall(struct.pack(">I", len(body)) + body)
say(op="ready", longest=64, running=4, waiting=4)
while True:
    say(op="began", id=1, prompt_tokens=1)
    time.sleep(0.02)
"""


def runs_instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """The engine's process is this code."""
    start = asyncio.create_subprocess_exec

    async def instead(python: str, flag: str, module: str, number: str, device: str, **options: object):  # noqa: ANN202
        return await start(sys.executable, "-c", code, number, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", instead)


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "import os; os.abort()"])
def test_an_engine_that_never_starts_is_not_started_for_ever(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """However its process ends: an error that nobody foresaw, or a signal, such as for memory."""
    runs_instead(monkeypatch, code)

    async def play() -> None:
        remote = Remote({})
        await asyncio.wait_for(remote.run(), 60)
        assert remote.failed == "the engine's process ended before it was ready"

    asyncio.run(play())


def test_a_step_that_hangs_is_noticed_though_others_still_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads requests goes on: what it says is no sign that steps do."""
    runs_instead(monkeypatch, HANGS)

    async def play() -> None:
        remote = Remote({}, stuck=0.5)
        keeper = asyncio.create_task(remote.run())
        with pytest.raises(HttpError, match="ended while it worked") as raised:
            async for _, message in remote.messages({"op": "submit", "settings": {"n": 1}}):
                assert message["op"] == "began"
        assert raised.value.status == 503 and not remote.ready.is_set()
        await asyncio.wait_for(remote.ready.wait(), 60)  # another process starts
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        assert remote._process is None

    asyncio.run(play())


def test_an_engine_ends_with_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model is compiled, too, when nobody reads what the server says."""
    ended, (server, engine) = threading.Event(), socket.socketpair()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    with server, engine:
        threading.Thread(target=worker.end_with, args=(engine,), daemon=True).start()
        server.sendall(b"more than is read")
        assert not ended.wait(0.1)
        server.close()
        assert ended.wait(10)
