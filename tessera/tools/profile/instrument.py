"""Programs that do the same and say when each equation ran, put in place of the compiled ones for a while.

In: compilations. Out: while the `with` block lasts, calls of the compiled function run programs generated anew with
something around every equation; what the function was compiled to is untouched and back in place afterwards.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tessera.executors.aten import bind
from tessera.ir.lifetimes import lifetimes
from tessera.ir.printer import compile_trace
from tessera.pipeline.account import Program
from tessera.pipeline.compilation import Compilation
from tessera.torch_internals.profiler import RecordFunctionFast

Log = list[tuple[int, int, int, int]]  # program, equation (or WHOLE), start and end in nanoseconds
WHOLE = -1
RANGE = "tessera/"  # what the names of ranges in a torch profile begin with
Instrument = Callable[[int, Program], Callable]
Labelled = tuple[Compilation, str]  # with the name it is shown by


@contextmanager
def in_place(compilations: Sequence[Labelled], instrument: Instrument) -> Iterator[list[tuple[str, Program]]]:
    """Run instrumented programs; gives each with the name of its graph, in the order of their numbers."""
    before = [c.executable.call for c, _ in compilations]
    programs = [(label, program) for c, label in compilations for program in c.account.programs]
    numbers = iter(range(len(programs)))
    try:
        for c, _ in compilations:
            runs = [instrument(next(numbers), program) for program in c.account.programs]
            c.executable.call = c.executable.join(*runs)
        yield programs
    finally:
        for (c, _), call in zip(compilations, before, strict=True):
            c.executable.call = call


def labelled(compilations: Sequence[Compilation]) -> list[Labelled]:
    """Each with a name of its own: functions that are called the same are told apart by a number."""
    seen: Counter[str] = Counter()
    pairs = []
    for c in compilations:
        seen[c.name] += 1
        pairs.append((c, c.name if seen[c.name] == 1 else f"{c.name} ({seen[c.name]})"))
    return pairs


def clocked(log: Log) -> Instrument:
    """The host's clock around every equation."""

    def instrument(number: int, program: Program) -> Callable:
        def around(index: int, line: str) -> list[str]:
            after = f"_tessera_log(({number}, {index}, _tessera_start, _tessera_now()))"
            return ["_tessera_start = _tessera_now()", line, after]

        run = _compiled(program, around, {"_tessera_now": time.perf_counter_ns, "_tessera_log": log.append})

        def whole(*args: object) -> object:
            start = time.perf_counter_ns()
            out = run(*args)
            log.append((number, WHOLE, start, time.perf_counter_ns()))
            return out

        return whole

    return instrument


def ranged(number: int, program: Program) -> Callable:
    """A range of the torch profiler around every equation: kernels launched in it are that equation's."""
    count = len(program.trace.equations)
    scope: dict[str, object] = {f"_tessera_range_{i}": _range(f"{RANGE}{number}/{i}") for i in range(count)}

    def around(index: int, line: str) -> list[str]:
        return [f"with _tessera_range_{index}:", f"    {line}"]

    run = _compiled(program, around, scope)
    everything = _range(f"{RANGE}{number}/{WHOLE}")

    def whole(*args: object) -> object:
        with everything:
            return run(*args)

    return whole


def _range(name: str):  # noqa: ANN202
    return RecordFunctionFast(name)


def _compiled(program: Program, around: Callable[[int, str], list[str]], scope: dict[str, object]) -> Callable:
    trace = program.trace
    dead = lifetimes(trace, inputs=program.boxed)
    return compile_trace(trace, bind=bind, dead=dead, around=around, names_in_scope=scope, boxed=program.boxed)
