"""A guard for one object under two names, of which one is a local and the other a global.

TorchDynamo traces a tensor once, however many names lead to it, and guards that the names stay one: but only where both
are locals, or both globals. `f(MASK)` of a function that reads MASK itself then leaves code which takes every later
argument for MASK. The guard holds between any two names, so here it is asked for between these too. It only makes
Dynamo compile once more where it would have run the wrong program; that is right for every backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import Source
from torch._dynamo.variables import builder

Guard = Callable[..., object]
DupeGuard = Callable[[Source, Source | None], Guard | None]


def _guarded(theirs: DupeGuard) -> DupeGuard:
    @functools.wraps(theirs)
    def make_dupe_guard(name: Source, other: Source | None) -> Guard | None:
        guard = theirs(name, other)
        if guard is None and other is not None and other != name:
            return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)
        return guard

    return make_dupe_guard


def guard_same_objects() -> None:
    """From now on, for all that Dynamo compiles in this process."""
    if not hasattr(builder.make_dupe_guard, "__wrapped__"):
        builder.make_dupe_guard = _guarded(builder.make_dupe_guard)
