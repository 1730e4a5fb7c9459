"""Runs a user's script with Tessera at work in it, and keeps what was compiled.

In: a script and its arguments. Out: a `Session`: every jitted function, the exit code, the script's names. The script
runs as `python script.py` runs it (`__main__`, sys.argv, sys.path, exit codes, tracebacks without our frames), except
that every `torch.compile` in it goes through Tessera, whatever backend it names.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tessera.just_in_time import compiled
from tessera.just_in_time.api import argument_names, name_of
from tessera.just_in_time.backend import Backend, Handle
from tessera.just_in_time.compiled import Compiled
from tessera.pipeline.options import Options
from tessera.torch_internals.dynamo import set_metrics_limit
from tessera.util.errors import InputError

METRICS = 100_000  # compilations that Dynamo keeps its account of; it keeps 64 by itself


@dataclass
class Session:
    """What running a script left behind."""

    script: str
    states: list[Compiled] = field(default_factory=list)
    exit_code: int = 0
    seconds: float = 0.0
    scope: dict[str, object] = field(default_factory=dict)


def run_script(script: str, args: Sequence[str] = ()) -> Session:
    """Run the script to its end; an exception in it is printed as Python prints it."""
    if not os.path.isfile(script):
        raise InputError(f"expected a Python script, found no file {script!r}")
    with open(script, "rb") as file:
        source = file.read()
    session = Session(script)
    start = time.perf_counter()
    with _as_main(script, args) as main, watching(session.states):
        session.scope = main.__dict__
        session.exit_code = _execute(source, script, main.__dict__)
    session.seconds = time.perf_counter() - start
    session.states = _accounts(session.states)
    return session


def _accounts(states: list[Compiled]) -> list[Compiled]:
    """Functions that share an account of their graphs, as the parts of a training step do, count once."""
    own = {id(getattr(state.backend, "graphs", state.backend)): state for state in reversed(states)}
    return list(reversed(own.values()))


def _execute(source: bytes, script: str, scope: dict[str, object]) -> int:
    try:
        exec(compile(source, script, "exec"), scope)
    except SystemExit as stop:
        return _exit_code(stop.code)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        own = error.__traceback__.tb_next if error.__traceback__ else None  # without the line above
        traceback.print_exception(type(error), error, own)
        return 1
    return 0


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return 1


@contextmanager
def _as_main(script: str, args: Sequence[str]) -> Iterator[types.ModuleType]:
    """The script's module stands where Python puts it: `__main__`, with its folder first on the path."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__, __spec__=None, __cached__=None)
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = [script, *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    sys.modules["__main__"] = main
    try:
        yield main
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


@contextmanager
def watching(states: list[Compiled]) -> Iterator[None]:
    """Everything jitted meanwhile is noted, and `torch.compile` is ours."""
    original = torch.compile
    set_metrics_limit(METRICS)
    compiled.WATCHERS.append(states.append)
    torch.compile = functools.partial(_compile, original)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original
        compiled.WATCHERS.remove(states.append)


def _compile(original: Callable, model: Callable | None = None, **keywords: object) -> Callable:
    """`torch.compile` with Tessera in place of whatever backend was named."""
    if model is None:
        return functools.partial(_compile, original, **keywords)
    if keywords.get("disable") or isinstance(keywords.get("backend"), Handle):
        return original(model, **keywords)  # `jit` itself calls torch.compile
    ours = dict(keywords.get("options") or {}) if keywords.get("backend") == "tessera" else {}  # type: ignore[call-overload]
    chosen = [ours.get(name) for name in ("executors", "recompute", "memory_budget")]
    options = Options.of(*chosen, offload=ours.get("offload"), precision=ours.get("precision"))
    backend = Backend(options, ours.get("strict"), name_of(model), argument_names(model))
    kept = {key: value for key, value in keywords.items() if key in ("fullgraph", "dynamic")}
    call = original(model, backend=backend, **kept)
    Compiled(model, backend, call, functools.partial(_compile, original, **keywords))
    return call
