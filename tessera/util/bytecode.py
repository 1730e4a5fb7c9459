"""Python's compiled modules, where their own folder does not hold them.

PyTorch alone is some 2,000 modules, which Python compiles for seconds at every start where they were installed without
bytecode and their folder cannot be written, as in many containers. Then bytecode is kept in our cache instead.
"""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from tessera.util import disk

FOLDER = "bytecode"  # in our cache


def _places(package: str) -> tuple[Path, Path] | None:
    """A package's first source, and where Python looks for its bytecode."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return None
    return Path(found.origin), Path(cache_from_source(found.origin))


def there(package: str = "torch") -> bool:
    """Is the package's bytecode at hand?"""
    places = _places(package)
    return places is not None and places[1].exists()


def keep(package: str = "torch") -> None:
    """Before the package is imported: see to it that this process, and those that it starts, compile it once."""
    places = _places(package)
    if places is None or places[1].exists() or sys.dont_write_bytecode or sys.pycache_prefix is not None:
        return
    source, kept = places
    if os.access(kept.parent if kept.parent.exists() else source.parent, os.W_OK):
        return
    try:
        chosen = str(disk.private_folder(FOLDER))
    except OSError:  # no folder of our own: it costs time, as ever
        return
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = chosen
