"""Tensors whose bytes lie in a file beside the model.

In: the folder of the model and what the tensor says (location, offset, length). Out: its bytes. Only files inside the
folder are opened (`util/inside.py`), and only bytes read that they have. `Origin` is where all tensors of a model come
from; it counts, so that many tensors cannot have more bytes than the files justify.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.limits import Limits
from tessera.util.inside import OutsideError, open_inside

_NUMBER = frozenset("0123456789")
OFTEN = 4  # times that the bytes of a file may be read; tensors that share some are copies
DESCRIBED = 2  # times `tensor_bytes` of all sparse tensors together, written out


class Origin:
    """The folder of a model's external data, what has been read of it, and what may still be described."""

    def __init__(self, folder: str | None, limits: Limits) -> None:
        self.folder, self.room = folder, DESCRIBED * limits.tensor_bytes
        self._read: dict[tuple[int, int], int] = {}

    def describe(self, count: int, what: str) -> None:
        """A few bytes of the file stand for so many."""
        self.room -= count
        if self.room < 0:
            raise OnnxError(f"{what}: sparse tensors of the file take more than the limit, written out")

    def count(self, about: os.stat_result, length: int, what: str) -> None:
        """So many bytes of a file are about to be read."""
        key = (about.st_dev, about.st_ino)
        self._read[key] = self._read.get(key, 0) + length
        if self._read[key] > OFTEN * about.st_size:
            raise OnnxError(f"{what}: tensors share the bytes of external data more than {OFTEN} times over")


def read_external(origin: Origin, entries: Mapping[str, str], expected: int, what: str) -> bytearray:
    """The `expected` bytes that a tensor says it has outside."""
    folder = origin.folder
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
        about = os.fstat(descriptor)
        size = about.st_size
        if offset + length > size:
            raise OnnxError(f"{what}: external data {location!r} has {size} bytes, expected {offset + length} or more")
        origin.count(about, length, what)
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
