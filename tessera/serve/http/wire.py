"""How the two processes speak: JSON objects, each behind four bytes that say how long it is.

From the server: `submit`, `cancel`, `tokenize`, `detokenize`, each with an `id`. From the engine: `ready` once, `beat`
with its counts every second, and for an id `began`, then `piece`s; or `refused`; or `answer`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct

_LENGTH = struct.Struct(">I")
Message = dict[str, object]


def pack(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def receive(sock: socket.socket) -> Message | None:
    """The next message; None when the other side has gone."""
    head = _exactly(sock, _LENGTH.size)
    body = None if head is None else _exactly(sock, _LENGTH.unpack(head)[0])
    return None if body is None else json.loads(body)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


async def read(stream: asyncio.StreamReader) -> Message | None:
    """The same for the server, which waits for many things at once."""
    try:
        head = await stream.readexactly(_LENGTH.size)
        return json.loads(await stream.readexactly(_LENGTH.unpack(head)[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
