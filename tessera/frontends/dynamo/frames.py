"""Frames of our own: the functions through which TorchDynamo sees what is compiled.

In: a module, a function, or a text that calls one. Out: functions with a code object of their own. Dynamo keeps
compiled code, and a limit on it, per code object: so neither the models of a class, nor what one decorator made, nor a
function that is compiled twice share their entries. Modules, and functions that Dynamo does not enter, get a file name
too: the sizes Dynamo has seen are kept per file, line and name, and hooks and torch.nn's own containers are captured as
well. The text stands in linecache, because PyTorch 2.11 puts all functions without a source behind one frame.
"""

from __future__ import annotations

import inspect
import itertools
import keyword
import linecache
import types
import weakref
from collections.abc import Callable

import torch

from tessera.torch_internals.dynamo import forget, innermost_fn
from tessera.torch_internals.frames import with_own_code
from tessera.torch_internals.modules import hooks_of

MODEL = "tessera_model"  # the name under which a frame knows what it calls
OWN_FILE = "<tessera call"  # how the file names of these frames begin

_numbers = itertools.count()


def entry_of(fn: Callable, name: str) -> Callable:
    """What Dynamo is to compile for this module, function or method: the same, in a frame that nobody else has."""
    fn = innermost_fn(fn)  # of torch.compile and torch.compiler.disable, as torch.compile does
    function = getattr(fn, "__func__", fn)
    if not inspect.isfunction(function) or isinstance(fn, torch.nn.Module) or not _entered(function):
        return own_frame(fn, name)
    copied = _own_code(function)
    return copied if function is fn else types.MethodType(copied, fn.__self__)  # type: ignore[attr-defined]


def _entered(function: types.FunctionType) -> bool:
    """Whether Dynamo enters the function as it is: what has no file, or is torch's, it calls from a shared frame."""
    file = inspect.getsourcefile(function)
    return file is not None and not file.startswith(f"{torch.__path__[0]}/")


def _own_code(function: types.FunctionType) -> types.FunctionType:
    copied = with_own_code(function)
    _forgotten_with(copied, copied)
    return copied


def _forgotten_with(owner: Callable, *functions: types.FunctionType) -> None:
    """When the owner goes, so does what Dynamo compiled for these functions."""
    for f in functions:
        weakref.finalize(owner, forget, f.__code__).atexit = False


def own_frame(fn: Callable, name: str) -> Callable:
    """A function of its own that calls the module or function."""
    name = f"_{name}" if keyword.iskeyword(name) or not name.isidentifier() else name
    look, hooks = looking_at_hooks(fn)
    text = f"def {name}(*args, **kwargs):\n    {look}\n    return {MODEL}(*args, **kwargs)\n"
    return own_frames(text, {MODEL: fn, **hooks})[name]


def looking_at_hooks(fn: Callable) -> tuple[str, dict[str, object]]:
    """A statement that looks at the hooks of a module, and the names in it. Dynamo captures hooks but does not guard
    that they stay; it does guard what a frame reads of the dictionaries that hold them."""
    if not isinstance(fn, torch.nn.Module):
        return "pass", {}
    held: dict[str, object] = {MODEL + kind: hooks for kind, hooks in hooks_of(fn).items()}
    return ", ".join(f"[*{name}]" for name in held), held


def own_frames(text: str, scope: dict[str, object]) -> dict[str, Callable]:
    """The functions that the text defines. The text is kept as long as they live, and so is the scope they read.

    They are not in that scope, and it is emptied when they go: what Dynamo keeps of their code, for good, holds the
    scope, and so the model in it.
    """
    file = f"{OWN_FILE} {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), scope)
    functions = {n: f for n, f in scope.items() if inspect.isfunction(f) and f.__code__.co_filename == file}
    for n, f in functions.items():
        del scope[n]
        f.__dict__["together"] = functions  # one of them keeps the others alive
    first = next(iter(functions.values()))
    weakref.finalize(first, linecache.cache.pop, file, None)
    weakref.finalize(first, _empty, scope)
    _forgotten_with(first, *functions.values())
    return functions  # type: ignore[return-value]


def _empty(scope: dict[str, object]) -> None:
    """Names stay: Dynamo deletes some of them itself."""
    scope.update(dict.fromkeys(scope))
