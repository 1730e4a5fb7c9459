"""TorchDynamo: its errors, settings and counters, what it holds of compiled code, and one guard that it leaves out."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tessera.torch_internals.frames import cache_entries, reset_code
from tessera.torch_internals.lookup import owner_of, symbol

_INSIDE = "tracing functions that torch.compile gave"
TorchDynamoException = symbol("torch._dynamo.exc.TorchDynamoException", "training steps that Dynamo cannot follow")
TorchRuntimeError = symbol("torch._dynamo.exc.TorchRuntimeError", "calls that fail in eager PyTorch too")
InternalTorchDynamoError = symbol("torch._dynamo.exc.InternalTorchDynamoError", "calls that Dynamo fails on")
FailOnRecompileLimitHit = symbol("torch._dynamo.exc.FailOnRecompileLimitHit", "saying why a step is not compiled again")
FOLDER = os.path.dirname(symbol("torch._dynamo", "telling Dynamo's own errors from the user's").__file__)
# The names under which it logs that it ends a graph, just before it does.
BREAK_LOGGERS = ("torch._dynamo.exc", *(f"torch._dynamo.variables.{name}" for name in ("builtin", "tensor", "torch")))

config = symbol("torch._dynamo.config", "how many programs Dynamo keeps of a function")
counters = symbol("torch._dynamo.utils.counters", "saying why a graph ended")
compile_lock = symbol("torch._dynamo.convert_frame.compile_lock", "compiling in one thread at a time")
innermost_fn: Callable[[Callable], Callable] = symbol(
    "torch._dynamo.eval_frame.innermost_fn", "compiling what torch.compile was given"
)
# Where a function that `torch.compile` gave asks at every call what to do with frames.
COMPILED_CALL = (owner_of("torch._dynamo.eval_frame._callback_from_stance", _INSIDE), "_callback_from_stance")
TracingContext = symbol("torch._guards.TracingContext", "finding the fake mode of Dynamo's graph")
CompileContext = symbol("torch._guards.CompileContext", "the number of a compilation")
compilation_metrics: Callable[[], list] = symbol(
    "torch._dynamo.utils.get_compilation_metrics", "saying that Dynamo compiled too often"
)
set_metrics_limit: Callable[[int], None] = symbol(
    "torch._dynamo.utils.set_compilation_metrics_limit", "the report of a whole script"
)
mark_dynamic: Callable[[object, int], None] = symbol(
    "torch._dynamo.mark_dynamic", "programs of the engine that take any number of tokens"
)
_metrics_context = symbol("torch._dynamo.utils.get_metrics_context", "saying why Dynamo compiles again")


_count_frames: Callable[[int], int] | None = symbol(
    "torch._C._dynamo.eval_frame.set_fullgraph_compiled_frame_count", _INSIDE, since=(2, 13), otherwise=None
)


@contextmanager
def frames_uncounted() -> Iterator[None]:
    """Inside, a function compiled with `fullgraph=True` does not ask afterwards if one was compiled at all."""
    if _count_frames is None:
        yield
        return
    before = _count_frames(0)  # as if a function around it counted
    try:
        yield
    finally:
        _count_frames(before)


def recompile_reason() -> str:
    """Why Dynamo compiles the frame at hand again; empty at a first time. It forgets soon, so this is asked at once."""
    return getattr(_metrics_context(), "_metrics", {}).get("recompile_reason") or ""


# --- what it holds ---

_seen = symbol("torch._dynamo.convert_frame.input_codes", "the guards that explain shows")
_resumed = symbol("torch._dynamo.resume_execution.ContinueExecutionCache", "freeing what was compiled of a function")
_clean_up = symbol("torch._dynamo.utils.CleanupManager", "freeing what was compiled of a function")
_origins = symbol("torch._dynamo.utils.orig_code_map", "freeing what was compiled of a function")


def all_entries() -> Iterator[Any]:
    """What Dynamo has compiled and may use again, of all frames."""
    for reference in _seen.seen:
        if (code := reference()) is not None:
            yield from cache_entries(code)


def forget(code: types.CodeType) -> None:
    """Free what was compiled of this code. Dynamo keeps it for good: the code holds what was compiled of it, and a
    table holds the code for as long as that lives."""
    after_breaks = (_resumed.cache.get(code) or {}).values()
    _resumed.cache._remove_id(id(code))  # it holds what resumes, which holds what it resumes
    for resumed in after_breaks:  # of a loop that is the code itself
        forget(resumed)
    compiled = [place for place, origin in _origins.values.items() if origin is code]
    reset_code(code)
    for place in compiled:  # code that ended in a graph break lives on, unused: take what it put into globals
        if place in _clean_up.instance.values:
            _clean_up.instance._remove_id(place)


# --- the guard it leaves out ---

_ONE_OBJECT = "guarding that two names stay one object"
_duplicate_input = symbol("torch._dynamo.guards.GuardBuilder.DUPLICATE_INPUT", _ONE_OBJECT)
_builder = owner_of("torch._dynamo.variables.builder.make_dupe_guard", _ONE_OBJECT)


def guard_same_objects() -> None:
    """From now on, for all that Dynamo compiles in this process: guard one object under a local and a global name.

    Dynamo traces a tensor once, however many names lead to it, and guards that the names stay one: but only where both
    are locals, or both globals. `f(MASK)` of a function that reads MASK itself then leaves code which takes every later
    argument for MASK. The guard holds between any two names, so here it is asked for between these too. It only makes
    Dynamo compile once more where it would have run the wrong program; that is right for every backend. Dynamo asks for
    it while it traces, before a backend sees a graph.
    """
    theirs = _builder.make_dupe_guard
    if hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def make_dupe_guard(name: object, other: object | None) -> Callable | None:
        guard = theirs(name, other)
        if guard is None and other is not None and other != name:
            return functools.partial(_duplicate_input, source_b=other)
        return guard

    _builder.make_dupe_guard = make_dupe_guard
