"""A save that goes on while training does.

In: what is left to do once tensors are copied to the host. Out: a `Saving`, to wait for. One save is under way at a
time; ranks meet in a group of their own, so their messages never stand between those of training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from tessera.distributed.compare import own_group


class Saving:
    """A save under way. One that nobody waits for is waited for by the next."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(work,), name="save_state")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # it is raised where somebody waits
            self._error = error

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the state is on the disk; raise what kept it from getting there."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


class _Last:
    """The last save that was begun."""

    saving = Saving()


def begin(work: Callable[[dist.ProcessGroup | None], None]) -> Saving:
    """Do the work in a thread. All ranks call it."""
    group = own_group("save")
    _Last.saving = Saving()
    _Last.saving.begin(lambda: work(group))
    return _Last.saving


def finish_last() -> None:
    _Last.saving.wait()
