"""Where the time has gone since this process began, phase by phase.

`with phase("weights"):` counts what is done there; a phase within another is taken out of that one, and a phase that
comes again is added. Only the main thread is counted, so that phases add up to no more than the whole. `account` says
all of it in one line: "9.8 s: python 0.1, imports 2.1, weights 4.0, …".
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tessera.util import bytecode

_spent: dict[str, float] = {}
_inner: list[float] = []  # for each phase under way, the seconds of those within it


def _born() -> float:
    """When this process began, by the monotonic clock: Linux knows; elsewhere it is now."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])  # since the machine was started
        return time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.monotonic()


_BEGAN = _born()
_spent["python"] = time.monotonic() - _BEGAN


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count what is done within."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _spent.setdefault(name, 0.0)
    _inner.append(0.0)
    start = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - start
        _spent[name] += took - _inner.pop()
        if _inner:
            _inner[-1] += took


def account() -> str:
    """Seconds until now, and what they went into."""
    whole = time.monotonic() - _BEGAN
    rows = [*_spent.items(), ("other", whole - sum(_spent.values()))]
    told = {} if bytecode.there() else {"imports": "imports without bytecode"}
    return f"{whole:.1f} s: " + ", ".join(f"{told.get(name, name)} {took:.1f}" for name, took in rows)
