"""Running the server: a port, the engine's process, signals.

The first SIGTERM or SIGINT drains: no new connection is taken, and what runs is answered, for at most `grace` seconds.
A second one stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tessera.serve.http.app import App, Config
from tessera.serve.http.remote import Remote
from tessera.serve.http.wire import Message
from tessera.util.errors import InputError

HEADERS = 10.0  # seconds in which a connection must have sent its first headers
HURRIED = 1.0  # seconds in which they may be told so when the server is to stop at once
CUT = 5.0  # seconds after the grace in which what has not ended may be told so


class Patient(H11Protocol):
    """A connection whose first request does not come is closed, and so is one whose next request stops halfway."""

    _late: asyncio.TimerHandle | None = None  # while headers are expected

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEADERS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._late = self._late or self.loop.call_later(HEADERS, self.transport.close)
        elif self._late is not None:  # the headers have come
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    app: App

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain first, then stop."""
        self.app.draining = True
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What has not ended when the time is over, or at a second signal, is told so before its connection is cut."""
        late = asyncio.get_running_loop().call_later(self.app.config.grace, self.app.remote.stop)
        await super().shutdown(sockets)
        late.cancel()
        if self.force_exit and self.server_state.tasks:
            self.app.remote.stop()
            await asyncio.wait(self.server_state.tasks, timeout=HURRIED)


def listen(config: Config) -> socket.socket:
    """A socket that listens; a port that is taken is one line."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        told = getattr(error, "strerror", None) or error
        raise InputError(f"{config.host}:{config.port}: expected a free port: {told}") from None


async def run(options: Message, config: Config) -> None:
    """Serve until a signal comes, or until it turns out that no engine can be started."""
    sock, remote = listen(config), Remote(options)
    app = App(remote, config)
    keeper = asyncio.create_task(remote.run())
    settings = uvicorn.Config(
        app.starlette, log_level="warning", access_log=False, lifespan="off", http=Patient, ws="none",
        timeout_keep_alive=30, timeout_graceful_shutdown=int(config.grace + CUT), server_header=False,
    )  # fmt: skip
    server = _Server(settings)
    server.app = app
    serving = asyncio.create_task(server.serve([sock]))
    asyncio.create_task(_announce(remote, sock))  # noqa: RUF006
    try:
        await asyncio.wait({serving, keeper}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            server.should_exit = True
            await serving
            raise InputError(remote.failed or "the engine could not be started")
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        sock.close()


async def _announce(remote: Remote, sock: socket.socket) -> None:
    await remote.ready.wait()
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"tessera serve: ready on http://{shown}:{port}/v1", file=sys.stderr, flush=True)
