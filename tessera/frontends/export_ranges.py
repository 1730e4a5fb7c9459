"""Sizes that `torch.export` does not leave as open as it was told: ranges that the program itself has.

In: what PyTorch said when it refused, the sizes it was given, and those that the user named. Out: sizes in the ranges
in which the program holds, for another attempt. A range that the user gave is never made smaller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch.export import Dim
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

from tessera.frontends.size_conditions import holds_from
from tessera.torch_internals import pytree

_RANGE = re.compile(r"(\w+) = Dim\('\1'.*\)")
_MOST = re.compile(r"Not all values of (\w+) = .* in the specified range (?:(\d+) <= )?\1 <= (\d+) satisfy .* != \3\.")
_GUARD = re.compile(r"Not all values of (\w+) = (\S+) in the specified range.* satisfy the generated guard (.*?)\.?")
_NOT_ONE = re.compile(r"  - Not all values of (\w+) = .* satisfy the generated guard .* != 1\.")
_NUMBER = re.compile(r"\b[1-9]\d{0,8}\b")
_VIOLATION = "  - "  # what a line about a size begins with
_LEAST = 64  # where an open range may begin


@dataclass(frozen=True)
class Sizes:
    """The sizes of an attempt; `deferred`: conditions on them that PyTorch cannot prove are checked at every call."""

    shapes: object
    deferred: bool = False


def narrower(message: str, sizes: Sizes, dynamic: object) -> Sizes | None:
    """Sizes in smaller ranges, where the message is about ranges alone; else None."""
    suggested = _suggested(message, sizes.shapes, dynamic)
    if suggested is not None:
        return Sizes(suggested, sizes.deferred)
    return None if sizes.deferred else _from_somewhere_on(message, sizes.shapes, dynamic)


def without_one(message: str) -> list[str]:
    """The sizes whose whole range is refused because the program computes for 1 in a way of its own; none where it is
    refused for something else too."""
    lines = [line for line in message.splitlines() if line.startswith(_VIOLATION)]
    found = [match[1] for line in lines if (match := _NOT_ONE.fullmatch(line))]
    return sorted(set(found)) if len(found) == len(lines) else []


def _suggested(message: str, shapes: object, dynamic: object) -> object:
    """Sizes in the ranges that PyTorch suggests, as a table of positions has one; None where it suggests something else
    than ranges, or a range for a size that the user gave one for. It suggests nothing where only the end of a range is
    a case of its own, as the whole of that table is."""
    suggested = message.partition("Suggested fixes:")[2].strip("\n").split("\n\n")[0].splitlines()
    suggested = suggested or [
        f"{name} = Dim('{name}', {f'min={low}, ' if low else ''}max={int(most) - 1})"
        for name, low, most in _MOST.findall(message)
    ]
    ranges = [match[1] for line in suggested if (match := _RANGE.fullmatch(line.strip()))]
    open_ended = {size for size in _named(dynamic) if isinstance(size, str)}
    if not ranges or len(ranges) != len(suggested) or not open_ended.issuperset(ranges):
        return None
    fixes = "\n".join(["Suggested fixes:", *suggested])
    return refine_dynamic_shapes_from_suggested_fixes(fixes, shapes)  # type: ignore[arg-type]


def _from_somewhere_on(message: str, shapes: object, dynamic: object) -> Sizes | None:
    """Sizes from where on the program's conditions hold: a difference of neighbours is no single element (`n - 1 != 1`)
    from three on. PyTorch knows no range for such a condition, nor that one always holds that does; it is checked at
    every call, too."""
    violations = [line for line in message.partition("Suggested")[0].splitlines() if line.startswith(_VIOLATION)]
    guards = [_GUARD.fullmatch(line.removeprefix(_VIOLATION)) for line in violations]
    given = {size[0]: (size[1], size[2]) for size in _named(dynamic) if isinstance(size, tuple)}
    ranges: dict[str, tuple[int, int | None]] = {}
    for guard in guards:
        if guard is None:
            return None
        name, source, condition = guard.groups()
        low, high = given.get(name, (1, None))
        found = _where(condition.replace(source, "n"), low, high, name in given)
        if found is None:
            return None
        first, last = ranges.get(name, found)
        ranges[name] = max(first, found[0]), min((n for n in (last, found[1]) if n is not None), default=None)
    return Sizes(_within(shapes, ranges), deferred=True) if ranges else None


def _where(condition: str, low: int, high: int | None, fixed: bool) -> tuple[int, int | None] | None:
    """The sizes that a condition holds for. Those of an open range may begin later, or end at one of the condition's
    numbers, as rows of a table do (`n == min(512, n)`)."""
    first = holds_from(condition, low, high)
    if first is not None and first <= (low if fixed else _LEAST):
        return first, high
    numbers = () if fixed else sorted(map(int, _NUMBER.findall(condition)), reverse=True)
    return next(((low, last) for last in numbers if low < last and holds_from(condition, low, last) == low), None)


def _within(shapes: object, ranges: Mapping[str, tuple[int, int | None]]) -> object:
    made: dict[str, Dim] = {}

    def narrowed(size: object) -> object:
        if not isinstance(size, Dim) or size.__name__ not in ranges:
            return size
        low, high = ranges[size.__name__]
        high = size.max if high is None else min(high, size.max)
        return made.setdefault(size.__name__, Dim(size.__name__, min=max(low, size.min), max=high))

    return pytree.tree_map(narrowed, shapes)


def _named(dynamic: object) -> list:
    """The sizes that the user named: a name, or a name and a range."""
    return pytree.tree_leaves(dynamic, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], str))
