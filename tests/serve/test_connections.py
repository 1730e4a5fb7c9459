"""A connection is closed where the headers of a request do not come: of its first one, and of any later one."""

from __future__ import annotations

import asyncio

import pytest

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from starlette.responses import PlainTextResponse  # noqa: E402
from starlette.types import Receive, Scope, Send  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from tessera.serve.http import main  # noqa: E402

WAIT = 0.3
WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def slow(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(2 * WAIT)  # an answer may take as long as it likes
    await PlainTextResponse("done")(scope, receive, send)


@pytest.mark.parametrize(
    ("sent", "answers"),
    [([], 0), ([WHOLE[:9]], 0), ([WHOLE], 1), ([WHOLE, WHOLE, WHOLE[:9]], 2)],
    ids=["nothing", "half", "one", "three"],
)
def test_headers_that_do_not_come_end_a_connection(
    monkeypatch: pytest.MonkeyPatch, sent: list[bytes], answers: int
) -> None:
    monkeypatch.setattr(main, "HEADERS", WAIT)

    async def play() -> bytes:
        config = uvicorn.Config(slow, lifespan="off", timeout_keep_alive=2 * WAIT)  # between two requests
        server = await asyncio.get_running_loop().create_server(
            lambda: main.Patient(config, ServerState(), {}), "127.0.0.1"
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        got = b""
        for data in sent:
            writer.write(data)
            if data == WHOLE:
                got += await reader.readuntil(b"done")
        got += await asyncio.wait_for(reader.read(), 60)  # until the connection is closed
        writer.close()
        server.close()
        return got

    assert asyncio.run(play()).count(b"done") == answers
