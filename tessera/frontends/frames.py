"""Frames of our own: the functions through which TorchDynamo sees a model.

In: a module, or a text that calls one. Out: functions with a code object and a file name of their own. Dynamo keeps
compiled code per code object, and the sizes it has seen per file, line and name: so a model shares neither its entries
(and their limit) nor its changing sizes with other models of its class, and hooks and torch.nn's own containers are
captured too. The text stands in linecache, because PyTorch 2.11 puts all functions without a source behind one frame.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import weakref
from collections.abc import Callable

MODEL = "tessera_model"  # the name under which a frame knows what it calls
OWN_FILE = "<tessera call"  # how the file names of these frames begin

_numbers = itertools.count()


def own_frame(fn: Callable, name: str) -> Callable:
    """A function of its own that calls the module or function."""
    text = f"def {name}(*args, **kwargs):\n    return {MODEL}(*args, **kwargs)\n"
    return own_frames(text, {MODEL: fn})[name]  # type: ignore[return-value]


def own_frames(text: str, scope: dict[str, object]) -> dict[str, object]:
    """The scope with the functions that the text defines; the text is kept as long as they live."""
    file = f"{OWN_FILE} {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), scope)
    frame = next(f for f in scope.values() if inspect.isfunction(f) and f.__code__.co_filename == file)
    weakref.finalize(frame, linecache.cache.pop, file, None)  # the functions of a scope keep one another alive
    return scope


def has_source(fn: Callable) -> bool:
    """Whether Dynamo enters the function as it is: what has no file it calls from a frame that all of those share."""
    try:
        return inspect.getsourcefile(fn) is not None
    except TypeError:  # written in C, or an object that can be called
        return False
