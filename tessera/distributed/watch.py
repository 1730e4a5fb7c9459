"""Where every rank is: who waits for others and in vain finds out who is missing, and where it was last seen.

In: the store behind a process group. A thread writes there, once in a while, the line at which this rank's main thread
is: of the program that runs, or of the user's own. Programs do nothing for it. Out: `absent`, the part of a message
that tells what became of other ranks. A rank whose notes stop coming is gone; one that ended says why.
"""

from __future__ import annotations

import atexit
import json
import linecache
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from tessera.ir.equation import short_path
from tessera.torch_internals.distributed import default_store
from tessera.util.errors import MeshError

EVERY = 1.0  # seconds between two notes of a rank
TOLD = 8  # ranks in a message
_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, threading.__file__))


class Watch:
    """This rank's notes, and its view of those of others."""

    def __init__(self, world: object) -> None:
        self.world, self.rank = world, dist.get_rank()
        every = max(EVERY, dist.get_world_size() / 1000)  # one store serves all ranks
        store = default_store().clone()  # a connection of the thread's own
        self.every, self.store = every, dist.PrefixStore("tessera", store)  # type: ignore[attr-defined]
        self.count, self.at, self.since = 0, "", time.monotonic()
        self.stop, self.ended, self.waited = threading.Event(), "", False  # ended because it waited in vain
        self.compiles = 0  # programs that are being compiled
        self.thread = threading.Thread(target=self.run, name="tessera watch", daemon=True)
        self.thread.start()

    def run(self) -> None:
        while self.note() and not self.stop.wait(self.every):
            pass

    def note(self) -> bool:
        """Write down where this rank is; False where the store is gone."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        at = self.ended or (position(frame) if frame is not None else "its end")
        if at != self.at:
            self.at, self.since = at, time.monotonic()
        self.count += 1
        told = {"count": self.count, "at": at, "for": time.monotonic() - self.since, "ended": bool(self.ended)}
        told |= {"waited": self.waited, "compiles": self.compiles > 0}
        try:
            self.store.set(str(self.rank), json.dumps(told))
        except RuntimeError:  # whoever kept it has ended
            return False
        return True

    def end(self, why: str, waited: bool) -> None:
        """The last note."""
        if not self.stop.is_set():
            self.stop.set()
            self.thread.join(self.every)
            self.ended, self.waited = self.at if waited else why, waited
            self.note()

    def notes(self, ranks: Sequence[int]) -> dict[int, dict] | None:
        """None where the store is gone."""
        try:
            return {r: json.loads(self.store.get(str(r))) for r in ranks if self.store.check([str(r)])}
        except RuntimeError:
            return None

    def absent(self, ranks: Sequence[int], here: str) -> str:
        """What became of these ranks, seen from a rank that waits here: stays long enough to see who still writes."""
        others = [r for r in ranks if r != self.rank][: 8 * TOLD]
        before = self.notes(others) or {}
        time.sleep(2.5 * self.every)
        after = self.notes(others)
        if after is None:
            return "; ".join([*(f"rank {r} was last seen at {n['at']}" for r, n in before.items()), NO_STORE])
        told = [_told(r, before.get(r), after.get(r), here) for r in others]
        first = min((order for order, _ in told), default=GONE)
        return "; ".join([text for order, text in told if order == first][:TOLD]) or "there is no other rank"


NO_STORE = "what became of ranks is not known, since the process that kept their notes has ended: rank 0, or torchrun"
GONE, ELSEWHERE, WAITED = range(3)  # whom a message names: only the first of these that there are


def _told(rank: int, before: dict | None, after: dict | None, here: str) -> tuple[int, str]:
    """About a rank, and whether it is the reason or one that waits too."""
    if after is None:
        return GONE, f"rank {rank} left no note"
    if after["waited"]:
        return WAITED, f"rank {rank} waited in vain at {after['at']} and ended"
    if after["ended"]:
        return GONE, f"rank {rank} ended: {after['at']}"
    if before is not None and before["count"] == after["count"]:
        return GONE, f"rank {rank} is gone; it was last seen at {after['at']}"
    return WAITED if after["at"] == here else ELSEWHERE, f"rank {rank} is at {after['at']}, for {after['for']:.0f} s"


def position(frame: FrameType | None) -> str:
    """The line that a stack is at: of the program that runs, otherwise of the user's own, and what we do there."""
    first, user, ours = frame, None, None
    while frame is not None and user is None:
        name = frame.f_code.co_filename
        if name.startswith("<tessera "):
            return linecache.getline(name, frame.f_lineno).strip()
        if name.startswith(_OURS):
            if not name.endswith(("watch.py", "compare.py", "channel.py")):
                ours = ours or frame
        elif not name.startswith(("<", *_LIBRARIES)):
            user = frame
        frame = frame.f_back
    shown = user or first
    where = f"{short_path(shown.f_code.co_filename)}:{shown.f_lineno}" if shown is not None else "an unknown line"
    return f"{where}, in {ours.f_globals['__name__']}.{ours.f_code.co_name}" if ours is not None else where


class _Watched:
    """The watch over the present process group."""

    watch: Watch | None = None


def start() -> None:
    """Begin to write notes, where there is somebody to read them."""
    if not dist.is_initialized() or dist.get_backend() == "fake" or dist.get_world_size() == 1:
        return
    world = dist.group.WORLD
    if _Watched.watch is None or _Watched.watch.world is not world:
        if _Watched.watch is None:
            atexit.register(_at_exit)
            sys.excepthook = _telling(sys.excepthook)
        _Watched.watch = Watch(world)


@contextmanager
def compiling() -> Iterator[None]:
    """Others are told that this rank compiles."""
    watch = _Watched.watch
    if watch is None:
        yield
        return
    watch.compiles += 1
    try:
        yield
    finally:
        watch.compiles -= 1


def note_of(rank: int) -> dict | None:
    """The last note of a rank."""
    return None if _Watched.watch is None else (_Watched.watch.notes([rank]) or {}).get(rank)


def absent(here: str, ranks: Sequence[int] | None = None) -> str:
    """What became of ranks, seen from a rank that waits here; of all of them where none are named."""
    watch = _Watched.watch
    if watch is None:
        return "nobody watched the ranks"
    return watch.absent(range(dist.get_world_size()) if ranks is None else ranks, here)


@contextmanager
def waiting(what: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """An exchange beside programs: where it fails, the error says what did not happen, where, and who is missing."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError, and this rank's own
        raise
    except RuntimeError as error:
        here = position(sys._getframe())
        raise MeshError(f"rank {dist.get_rank()}: {what}, at {here}: {absent(here, ranks)} ({error})") from error


def _at_exit() -> None:
    if _Watched.watch is not None:
        _Watched.watch.end("it is through", False)


def _telling(hook):  # noqa: ANN001, ANN202
    """As the hook, after the others were told why this rank ends."""

    def run(kind, error, traceback) -> None:  # noqa: ANN001
        if _Watched.watch is not None:
            _Watched.watch.end(f"{kind.__name__}: {error}", issubclass(kind, MeshError))
        hook(kind, error, traceback)

    return run
