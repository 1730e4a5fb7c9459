"""What an executor is, and the registry of them.

An operator executor claims single equations: it is asked for a callable that computes what the equation's
operator computes. A fusion executor claims regions: it names sets of equations and compiles each into one
callable. Executors are asked in the order in which they are listed; what nobody claims is run by ATen.

Either may bring passes of its own, which stand in the pipelines where these fields are named: `rewrite` on a program
without gradients, whose operators are whole; `decompose` before it is decided what backward saves; `prepare` just
before regions are chosen; `finish` on the final program, where writes happen in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tessera.ir.equation import Equation, Recipe
from tessera.ir.trace import Trace
from tessera.util.errors import OptionError

Region = list[int]  # indices of equations, in order
Passes = tuple[tuple[str, Callable[[Trace], Trace]], ...]  # named passes that an executor brings along


@dataclass(frozen=True)
class OperatorExecutor:
    """`claims(eqn)` gives a callable that takes the equation's arguments as they stand, or None."""

    name: str
    claims: Callable[[Equation], Callable | None]
    why: Callable[[Equation], str] | None = None  # a word on what it does with an equation, or why not
    operators: tuple[str, ...] | None = None  # those it looks at ("aten.gelu"); None: any
    rewrite: Passes = ()
    finish: Passes = ()


@dataclass(frozen=True)
class FusionExecutor:
    """`regions(trace)` gives convex sets of equations, `compile(body)` a callable that gives a tuple.

    `compile` may refuse a region by giving None: its equations then go to the executors after this one. `together` may
    find sets of regions that are one launch, single equations outside the regions among them; `compile_together` makes
    a callable of such a set, from the region that it makes up and from each of them. `save` gives what a callable was
    made of as data, None where that cannot be, and `restore` makes one that does the same from a recipe of that form
    and that data, None where something is gone.
    """

    name: str
    regions: Callable[[Trace], list[Region]]
    compile: Callable[[Trace], Callable | None]
    why: Callable[[Equation], str] | None = None
    rewrite: Passes = ()
    decompose: Passes = ()
    prepare: Passes = ()
    finish: Passes = ()
    reasons: Callable[[Trace], dict[str, str]] | None = None  # why each equation outside the regions stays out
    together: Callable[[Trace, list[Region]], list[list[Region]]] | None = None
    compile_together: Callable[[Trace, list[Trace]], Callable | None] | None = None
    save: Callable[[Callable], dict | None] | None = None
    restore: Callable[[Recipe, dict], Callable | None] | None = None


Executor = OperatorExecutor | FusionExecutor


def passes_at(place: str, executors: Iterable[Executor]) -> Iterator[tuple[Executor, str, Callable[[Trace], Trace]]]:
    """The passes that executors bring along for one place in the pipelines, with who brings each."""
    for executor in executors:
        for name, apply in getattr(executor, place, ()):
            yield executor, name, apply


@dataclass(frozen=True)
class _Entry:
    executor: Executor
    always: bool  # takes part although the list of names does not name it
    priority: int
    before: str | None


_registry: dict[str, _Entry] = {}


def register(executor: Executor, always: bool = False, priority: int = 0, before: str | None = None) -> None:
    """Make an executor known by its name. With `always` it takes part in every compilation."""
    if executor.name in _registry:
        raise OptionError(f"an executor called {executor.name!r} is registered already")
    _registry[executor.name] = _Entry(executor, always, priority, before)


def unregister(name: str) -> None:
    if _registry.pop(name, None) is None:
        raise OptionError(f"no executor called {name!r}; there are {', '.join(sorted(_registry))}")


def known() -> list[Executor]:
    """Every executor that is registered."""
    return [entry.executor for entry in _registry.values()]


def in_order(names: Iterable[str | Executor]) -> list[Executor]:
    """The executors of these names; those that always take part stand in front or where they asked to."""
    chosen: list[Executor] = []
    for name in names:
        if isinstance(name, Executor):
            chosen.append(name)
        elif not isinstance(name, str):
            raise OptionError(f"executors: expected names such as 'tile' or 'aten', got {name!r}")
        elif name in _registry:
            chosen.append(_registry[name].executor)
        else:
            raise OptionError(f"unknown executor {name!r}; there are {', '.join(sorted(_registry))}")
    present = {executor.name for executor in chosen}
    extra = [e for e in _registry.values() if e.always and e.executor.name not in present]
    front = sorted((e for e in extra if e.before not in present), key=lambda e: -e.priority)
    for entry in sorted((e for e in extra if e.before in present), key=lambda e: -e.priority):
        place = next(i for i, executor in enumerate(chosen) if executor.name == entry.before)
        chosen.insert(place, entry.executor)
    return [e.executor for e in front] + chosen
