"""A file that another file names, in the same folder: opened so that nothing leads out of it.

In: a folder and a path that a stranger wrote. Out: a descriptor, or `OutsideError`. Folders are opened one at a time,
and no step follows a link, so neither `..` nor a link leads out; only a regular file with one name is opened, without
waiting for a pipe.
"""

from __future__ import annotations

import os
import stat


class OutsideError(ValueError):
    """What is wrong with the path or with what it leads to."""


def open_inside(folder: str, location: str) -> int:
    descriptor = _open(folder, location)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OutsideError("no regular file")
        if about.st_nlink > 1:
            raise OutsideError("several names (hard links)")
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _open(folder: str, location: str) -> int:
    parts = [p for p in location.replace("\\", "/").split("/") if p != "."]
    if not location or "\0" in location or ".." in parts or "" in parts:
        raise OutsideError("expected a path inside the model's folder")
    if ":" in parts[0]:
        raise OutsideError("expected a relative path")
    where = os.open(os.path.realpath(folder), os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = _step(where, part, os.O_DIRECTORY)
            os.close(where)
            where = inner
        return _step(where, parts[-1], os.O_NONBLOCK)  # a pipe must not make us wait
    finally:
        os.close(where)


def _step(where: int, name: str, kind: int) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=where)
    except (OSError, ValueError) as error:
        raise OutsideError(f"cannot be opened: {error}") from error
