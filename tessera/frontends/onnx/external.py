"""Tensors whose bytes lie in a file beside the model.

In: the folder of the model and what the tensor says (location, offset, length). Out: its bytes. A file is opened one
folder at a time, and no step follows a link: neither a name with `..` nor a link inside the folder leads out of it.
Only regular files with one name are read, and only bytes that they have.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from tessera.frontends.onnx.errors import OnnxError

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
    descriptor = _open(folder, location, what)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OnnxError(f"{what}: external data {location!r} is no regular file")
        if about.st_nlink > 1:
            raise OnnxError(f"{what}: external data {location!r} has several names (hard links)")
        if offset + length > about.st_size:
            raise OnnxError(
                f"{what}: external data {location!r} has {about.st_size} bytes, expected {offset + length} or more"
            )
        return _read(descriptor, offset, length, what)
    finally:
        os.close(descriptor)


def _number(text: str, what: str) -> int:
    if not 0 < len(text) <= 19 or not set(text) <= _NUMBER:
        raise OnnxError(f"{what}: expected a number of bytes, got {text[:40]!r}")
    return int(text)


def _open(folder: str, location: str, what: str) -> int:
    parts = location.replace("\\", "/").split("/")
    parts = [p for p in parts if p != "."]
    if not location or "\0" in location or location.startswith(("/", "\\")) or ".." in parts or "" in parts:
        raise OnnxError(f"{what}: expected external data inside the model's folder, got location {location[:200]!r}")
    if ":" in parts[0]:
        raise OnnxError(f"{what}: expected a relative path for external data, got {location[:200]!r}")
    where = os.open(os.path.realpath(folder), os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = _step(where, part, os.O_DIRECTORY, location, what)
            os.close(where)
            where = inner
        return _step(where, parts[-1], os.O_NONBLOCK, location, what)  # a pipe must not make us wait
    finally:
        os.close(where)


def _step(where: int, name: str, kind: int, location: str, what: str) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=where)
    except (OSError, ValueError) as error:
        raise OnnxError(f"{what}: external data {location[:200]!r} cannot be opened: {error}") from error


def _read(descriptor: int, offset: int, length: int, what: str) -> bytearray:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            raise OnnxError(f"{what}: external data ends after {done} of {length} bytes")
        done += count
    return data
