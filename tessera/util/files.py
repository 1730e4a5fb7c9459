"""Files: where the package lies, and those that are written at the end of long work."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tessera.util.errors import OptionError

PACKAGE = str(Path(__file__).parents[1]) + os.sep  # how the names of Tessera's own files begin


def check_writable(path: str | Path) -> None:
    """Say before the work that its result could not be written; nothing is left behind."""
    path = Path(path)
    if path.is_dir():
        raise OptionError(f"{path}: expected a file to write, got a folder")
    place = path if path.exists() else path.parent
    if not place.exists():
        raise OptionError(f"{path}: the folder {path.parent} does not exist")
    if not os.access(place, os.W_OK):
        raise OptionError(f"{path}: cannot be written: no permission")


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that is written beside its place and moved there at the end; if something is raised, nothing is left."""
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
