"""The engine as the server sees it: a process that is started, asked, watched, and started again.

In: requests. Out: messages for each of them, until its end. When the engine's process ends, or says nothing for too
long, whatever ran gets an error and a new process starts; requests that come meanwhile wait for it. A reader who is too
slow is cancelled: his pieces do not pile up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from tessera.serve.http.wire import Message, pack, read
from tessera.util.log import log

BEHIND = 4096  # messages that may wait for a reader
STEPS = ("ready", "beat", "piece")  # what the thread says that computes steps; others go on when it hangs
BACKOFF = 1.0, 30.0  # seconds before an engine is started again, and at most


class EngineError(Exception):
    """The engine could not answer: `status` is what HTTP calls it, `param` the field at fault."""

    def __init__(self, message: str, status: int = 500, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param


@dataclass(eq=False)
class Call:
    """One request that the engine works on."""

    number: int
    left: int = 1  # answers that have not ended
    queue: asyncio.Queue[Message] = field(default_factory=lambda: asyncio.Queue(BEHIND))


class Remote:
    """`options` are those of `tessera.Engine`. `stuck` seconds without a word mean that a step hangs."""

    def __init__(self, options: Message, stuck: float = 300.0):
        self.options, self.stuck = options, stuck
        self.about: Message = {}  # the model: `longest`; and `room` for sequences
        self.metrics: Message = {}
        self.starts = 0
        self.ready = asyncio.Event()
        self.failed: str | None = None  # why no engine can be started
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._heard = 0.0
        self._process: asyncio.subprocess.Process | None = None

    # --- the process ---

    async def run(self) -> None:
        """Keep an engine running, until the task is cancelled or the first start fails."""
        wait = BACKOFF[0]
        try:
            while True:
                began = time.monotonic()
                await self._once()
                if self.failed is not None and self.starts == 0:
                    return
                wait = BACKOFF[0] if time.monotonic() - began > 60 else min(2 * wait, BACKOFF[1])
                log(0, f"serve: the engine's process ended; another one starts in {wait:.0f} s")
                await asyncio.sleep(wait)
        finally:
            await self._end()

    async def _once(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tessera.serve.http.worker", str(theirs.fileno()), pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )  # fmt: skip
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(pack(self.options))
        self._heard = time.monotonic()
        watch = asyncio.create_task(self._watch())
        try:
            while (message := await read(reader)) is not None:
                if message["op"] in STEPS:
                    self._heard = time.monotonic()
                self._take(message)
        finally:
            watch.cancel()
            self.ready.clear()
            await self._end()
            for call in list(self._calls.values()):
                self._give(call, {"op": "lost"})
            self._calls.clear()

    async def _watch(self) -> None:
        """End a process that hangs. Before it is ready it says nothing, and may take its time."""
        while True:
            await asyncio.sleep(min(1.0, self.stuck / 4))
            if self.ready.is_set() and time.monotonic() - self._heard > self.stuck:
                log(0, f"serve: a step has taken more than {self.stuck:.0f} s; the engine is started again")
                assert self._process is not None
                self._process.kill()

    async def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None

    def _take(self, message: Message) -> None:
        match message["op"]:
            case "ready":
                self.about, self.starts, self.failed = message, self.starts + 1, None
                self.ready.set()
            case "failed":
                self.failed = str(message["error"])
            case "beat":
                self.metrics = message["metrics"]  # type: ignore[assignment]
            case _:
                call = self._calls.get(message["id"])  # type: ignore[call-overload]
                if call is not None:
                    self._give(call, message)
                    call.left -= message["op"] == "piece" and message["finish"] is not None
                    if call.left == 0 or message["op"] in ("refused", "answer"):
                        self._calls.pop(call.number, None)

    def _give(self, call: Call, message: Message) -> None:
        if call.queue.full():
            self._calls.pop(call.number, None)
            self._tell({"op": "cancel", "id": call.number})
            call.queue.get_nowait()
            message = {"op": "slow"}
        call.queue.put_nowait(message)

    def _tell(self, message: Message) -> None:
        if self._writer is not None:
            self._writer.write(pack(message))

    # --- asking ---

    async def messages(self, message: Message, patience: float = 60.0) -> AsyncGenerator[Message, None]:
        """What the engine says to a request. Whoever leaves before the end cancels it."""
        try:
            await asyncio.wait_for(self.ready.wait(), patience)
        except TimeoutError:
            raise EngineError("the engine is starting", 503) from None
        n = message.get("settings", {}).get("n", 1)  # type: ignore[attr-defined]
        taken, room = sum(call.left for call in self._calls.values()), self.about["room"]
        if message["op"] == "submit" and taken + n > room:  # type: ignore[operator]
            # The engine would refuse it, too. To ask would take time from those that it works on.
            raise EngineError(f"{taken} sequences are waiting or computed; at most {room} may", 429)
        call = Call(next(self._numbers), n)
        self._calls[call.number] = call
        self._tell({**message, "id": call.number})
        try:
            while True:
                yield _checked(await call.queue.get())
        finally:
            if self._calls.pop(call.number, None) is not None:
                self._tell({"op": "cancel", "id": call.number})

    async def ask(self, message: Message) -> Message:
        """One question, one answer."""
        async with contextlib.aclosing(self.messages(message)) as messages:
            async for answer in messages:
                return answer
        raise EngineError("the engine gave no answer")


def _checked(message: Message) -> Message:
    match message["op"]:
        case "lost":
            raise EngineError("the engine ended while it worked on this request", 503)
        case "slow":
            raise EngineError("the answer was read too slowly", 503)
        case "refused" if message["retry"]:
            raise EngineError(str(message["error"]), 429)
        case "refused":
            param = None if message["param"] is None else str(message["param"])
            raise EngineError(str(message["error"]), 500 if message["fault"] else 400, param=param)
    return message
