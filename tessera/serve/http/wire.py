"""How the two processes speak: JSON objects, each behind four bytes that say how long it is.

From the server: `submit`, `cancel`, `tokenize`, `detokenize`, each with an `id`. From the engine: `ready` once, `beat`
with its counts every second, and for an id `began`, then `piece`s; or `refused`; or `answer`.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import BinaryIO

_LENGTH = struct.Struct(">I")
Message = dict[str, object]


def pack(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def receive(stream: BinaryIO) -> Message | None:
    """The next message; None when the other side has gone."""
    head = stream.read(_LENGTH.size)
    size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
    body = stream.read(size)
    return json.loads(body) if size and len(body) == size else None


async def read(stream: asyncio.StreamReader) -> Message | None:
    """The same for the server, which waits for many things at once."""
    try:
        head = await stream.readexactly(_LENGTH.size)
        return json.loads(await stream.readexactly(_LENGTH.unpack(head)[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
