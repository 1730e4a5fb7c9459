"""Files: where the package lies, and those that are written at the end of long work."""

from __future__ import annotations

import os
from pathlib import Path

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
