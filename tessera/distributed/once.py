"""Ranks that compile: one of them for all on a host, and nobody waits for it in a collective.

In: what makes a program and stores it, and what reads it from there. Out: this rank has the program. The first rank of
a host that wants a program makes it; the others look for it until it is there, and make it themselves where the first
one failed or is gone. `meet` lets ranks go on together after that: whoever is through waits for those who compile, for
as long as they do, which no collective with a deadline could.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tessera.distributed import watch
from tessera.distributed.deadlines import deadline
from tessera.torch_internals.distributed import default_store
from tessera.util import disk

LOOK = 0.02  # seconds between two looks at the store
SILENCE = 30.0  # seconds without a note, after which a rank that compiles is gone


def store() -> Any:
    """What all ranks reach; None where this rank is alone."""
    if not dist.is_initialized() or dist.get_backend() == "fake" or dist.get_world_size() == 1:
        return None
    return dist.PrefixStore("tessera programs", default_store())  # type: ignore[attr-defined]


def once(name: str | None, make: Callable[[], None], fetch: Callable[[], bool]) -> None:
    """`make` on one rank of each host, then `fetch` on the others. What has no name is made by everybody."""
    shared = store()
    if shared is None or name is None:
        with watch.compiling():
            make()
        return
    name = f"{name} {socket.gethostname()} {disk.folder()}"
    if shared.add(name, 1) == 1:
        shared.set(f"{name} by", str(dist.get_rank()))
        try:
            with watch.compiling():
                make()
        finally:
            shared.set(f"{name} done", "")
        return
    _wait_for(shared, name)
    if not fetch():
        with watch.compiling():
            make()


def _wait_for(shared: Any, name: str) -> None:
    """Until a program is made, or whoever makes it is gone."""
    heard, last = time.monotonic(), None
    while not shared.check([f"{name} done"]):
        time.sleep(_pause())
        if shared.check([f"{name} by"]):
            note = watch.note_of(int(shared.get(f"{name} by")))
            count = None if note is None else note["count"]
            if count != last:
                heard, last = time.monotonic(), count
        if time.monotonic() - heard > SILENCE:
            return


_meetings = itertools.count()


def meet() -> None:
    """Wait for all ranks to come here, as long as those who are missing compile. Whoever does not come, and does not
    compile either, is left to the collective that follows, which tells who is missing."""
    shared = store()
    if shared is None:
        return
    name, ranks = f"meeting {next(_meetings)}", dist.get_world_size()
    shared.set(f"{name} {dist.get_rank()}", "")
    shared.add(name, 1)
    quiet = time.monotonic()
    while shared.add(name, 0) < ranks and time.monotonic() - quiet < deadline().total_seconds() / 2:
        time.sleep(_pause())
        if time.monotonic() - quiet > watch.EVERY:
            missing = [r for r in range(ranks) if not shared.check([f"{name} {r}"])]
            notes = [watch.note_of(r) for r in missing]
            if any(note is not None and note["compiles"] for note in notes):
                quiet = time.monotonic()


def _pause() -> float:
    return max(LOOK, dist.get_world_size() / 10_000)  # one store serves all ranks
