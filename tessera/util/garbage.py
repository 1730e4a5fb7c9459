"""Python's collector of garbage, stopped for a while."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """For work that makes much and drops little: looking for garbage among it would take longer than the work."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def freeze() -> None:
    """Nobody looks for garbage among what there is now, until the process ends. Then it is let go of: a library that
    counts what is left at the end, as Triton's bindings do, would report all of it as leaked."""
    gc.freeze()
    atexit.register(gc.unfreeze)
