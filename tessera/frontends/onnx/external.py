"""Tensors whose bytes lie in a file beside the model.

In: the folder of the model and what the tensor says (location, offset, length). Out: its bytes. Only files inside the
folder are opened (`util/inside.py`), and only bytes read that they have.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tessera.frontends.onnx.errors import OnnxError
from tessera.util.inside import OutsideError, open_inside

_NUMBER = frozenset("0123456789")


def read_external(folder: str | None, entries: Mapping[str, str], expected: int, what: str) -> bytearray:
    """The `expected` bytes that a tensor says it has outside."""
    if folder is None:
        raise OnnxError(f"{what}: its data lies in another file, and a model given as bytes has no folder")
    location = entries.get("location", "")
    offset = _number(entries.get("offset", "0"), f"{what}: offset of external data")
    length = _number(entries.get("length", str(expected)), f"{what}: length of external data")
    if length != expected:
        raise OnnxError(f"{what}: expected {expected} bytes of external data, the file says {length}")
    try:
        descriptor = open_inside(folder, location)
    except OutsideError as error:
        raise OnnxError(f"{what}: external data {location[:200]!r}: {error}") from error
    try:
        size = os.fstat(descriptor).st_size
        if offset + length > size:
            raise OnnxError(f"{what}: external data {location!r} has {size} bytes, expected {offset + length} or more")
        return _read(descriptor, offset, length, what)
    finally:
        os.close(descriptor)


def _number(text: str, what: str) -> int:
    if not 0 < len(text) <= 19 or not set(text) <= _NUMBER:
        raise OnnxError(f"{what}: expected a number of bytes, got {text[:40]!r}")
    return int(text)


def _read(descriptor: int, offset: int, length: int, what: str) -> bytearray:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            raise OnnxError(f"{what}: external data ends after {done} of {length} bytes")
        done += count
    return data
