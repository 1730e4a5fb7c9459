"""The engine as the server sees it: a process that is started, asked, watched, and started again.

In: requests. Out: messages for each of them, until its end. When the engine's process ends, or says nothing for too
long, whatever ran gets an error and a new process starts; requests that come meanwhile wait for it. A reader who is too
slow is cancelled: his pieces do not pile up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Sequence

from tessera.serve.http.errors import HttpError
from tessera.serve.http.wire import Message, pack, read
from tessera.util.log import log

BEHIND = 4096  # messages that may wait for a reader
STEPS = ("ready", "beat", "piece")  # what the thread says that computes steps; others go on when it hangs
# Ends that are no answers, and their status.
ENDS = {
    "lost": ("the engine ended while it worked on this request", 503), "stopped": ("the server stops", 503),
    "slow": ("the answer was read too slowly", 503), "cancelled": ("the request was cancelled", 503),
    "deadline": ("the request's timeout has passed", 408),
}  # fmt: skip
BACKOFF = 1.0, 30.0  # seconds before an engine is started again, and at most


class Call:
    """One request: its prompts have numbers, and each of them answers that have not ended."""

    def __init__(self, left: dict[int, int]):
        self.left = left
        self.queue = asyncio.Queue[Message](BEHIND * len(left))


class Remote:
    """`options` are those of `tessera.Engine`. `stuck` seconds without a word mean that a step hangs."""

    def __init__(self, options: Message, stuck: float = 300.0):
        self.options, self.stuck = options, stuck
        self.about: Message = {}  # the model: `longest`; and how many sequences may be `running` and `waiting`
        self.metrics: Message = {}
        self.starts = 0
        self.ready = asyncio.Event()
        self.failed: str | None = None  # why no engine can be started
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._heard, self._stopped = 0.0, False
        self._process: asyncio.subprocess.Process | None = None

    # --- the process ---

    async def run(self) -> None:
        """Keep an engine running, until the task is cancelled or the first start fails."""
        wait = BACKOFF[0]
        try:
            while True:
                began = time.monotonic()
                await self._once()
                if self.starts == 0:  # whatever ended it would end the next one, too
                    self.failed = self.failed or "the engine's process ended before it was ready"
                    return
                wait = BACKOFF[0] if time.monotonic() - began > 60 else min(2 * wait, BACKOFF[1])
                told = f"ended: {self.failed}" if self.failed else "ended"
                log(0, f"serve: the engine's process {told}; another one starts in {wait:.0f} s")
                await asyncio.sleep(wait)
        finally:
            await self._end()

    async def _once(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tessera.serve.http", str(theirs.fileno()), str(self.options.get("device")),
            pass_fds=(theirs.fileno(),), start_new_session=True,
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
            for call in set(self._calls.values()):
                self._give(call, {"op": "lost"})
            self._calls.clear()

    async def _watch(self) -> None:
        """End a process that hangs. Before it is ready it says nothing, and may take its time."""
        while True:
            await asyncio.sleep(min(1.0, self.stuck / 4))
            if self.ready.is_set() and time.monotonic() - self._heard > self.stuck:
                log(0, f"serve: a step has taken more than {self.stuck:.0f} s; the engine is started again")
                self._kill()

    async def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None:
            self._kill()
            await self._process.wait()
            self._process = None

    def _kill(self) -> None:
        """End the process and what it has started. Asyncio's own `kill` may take its exit code away from asyncio."""
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _take(self, message: Message) -> None:
        match message["op"]:
            case "ready":
                self.about, self.starts, self.failed = message, self.starts + 1, None
                self.ready.set()
            case "failed":
                self.failed = str(message["error"])
            case "beat":
                self.metrics = message["metrics"]  # type: ignore[assignment]
            case _ if (call := self._calls.get(message["id"])) is not None:  # type: ignore[call-overload]
                number: int = message["id"]  # type: ignore[assignment]
                self._give(call, message)
                call.left[number] -= message["op"] == "piece" and message["finish"] is not None
                if not call.left[number] or message["op"] in ("refused", "answer"):
                    self._calls.pop(number, None)

    def _give(self, call: Call, message: Message) -> None:
        if call.queue.full():
            self._cancel(call)
            call.queue.get_nowait()
            message = {"op": "slow"}
        call.queue.put_nowait(message)

    def _cancel(self, call: Call) -> None:
        """What has ended is not cancelled."""
        for number in call.left:
            if self._calls.pop(number, None) is not None:
                self._tell({"op": "cancel", "id": number})

    def stop(self) -> None:
        """The server stops: what has not been answered, or waits for an engine, gets an error."""
        self._stopped = True
        self.ready.set()
        for call in set(self._calls.values()):
            self._give(call, {"op": "stopped"})
        self._calls.clear()

    def _tell(self, message: Message) -> None:
        if self._writer is not None:
            self._writer.write(pack(message))

    # --- asking ---

    async def messages(self, *asked: Message, patience: float = 60.0) -> AsyncGenerator[tuple[int, Message], None]:
        """What the engine says to each of these, by its place. Whoever leaves before the end cancels them all."""
        try:
            await asyncio.wait_for(self.ready.wait(), patience)
        except TimeoutError:
            raise HttpError("the engine is starting", status=503) from None
        if self._stopped:
            raise HttpError(ENDS["stopped"][0], status=503)
        counts = [message.get("settings", {}).get("n", 1) for message in asked]  # type: ignore[attr-defined]
        if asked[0]["op"] == "submit":
            self._admit(counts)
        call = Call({next(self._numbers): count for count in counts})
        places = {number: place for place, number in enumerate(call.left)}
        self._calls.update(dict.fromkeys(places, call))
        for number, message in zip(places, asked, strict=True):
            self._tell({**message, "id": number})
        try:
            while True:
                message = _checked(await call.queue.get())
                yield places[message["id"]], message  # type: ignore[index]
        finally:
            self._cancel(call)

    def _admit(self, counts: Sequence[int]) -> None:
        """Refuse what the engine would refuse, too: to ask would take time from those that it works on."""
        wanted, waiting = sum(counts), int(self.about["waiting"])  # type: ignore[call-overload]
        if wanted > waiting:
            field = "prompt" if len(counts) > 1 else "n"
            raise HttpError(f"{field}: {wanted} answers are asked for at once; at most {waiting} may wait", field)
        room = waiting + int(self.about["running"])  # type: ignore[call-overload]
        taken = sum(call.left[number] for number, call in self._calls.items())
        if taken + wanted > room:
            raise HttpError(f"{taken} sequences are waiting or computed; at most {room} may", status=429)

    async def ask(self, message: Message) -> Message:
        """One question, one answer."""
        async with contextlib.aclosing(self.messages(message)) as messages:
            return (await anext(messages))[1]


def _checked(message: Message) -> Message:
    """A message, unless it says that there is no answer."""
    if told := ENDS.get(str(message["op"])) or ENDS.get(str(message.get("finish"))):
        raise HttpError(told[0], status=told[1])
    match message:
        case {"op": "refused", "error": str(why), "param": str() | None as param}:
            raise HttpError(why, param, 429 if message["retry"] else 500 if message["fault"] else 400)
        case {"finish": "error", "error": str(why)}:
            raise HttpError(why, status=500)
    return message
