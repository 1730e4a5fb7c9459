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
    least: dict[str, int] = {}
    for guard in guards:
        if guard is None:
            return None
        name, source, condition = guard.groups()
        low, high = given.get(name, (1, None))
        first = holds_from(condition.replace(source, "n"), low, high)
        if first is None or first > (low if name in given else _LEAST):
            return None
        least[name] = max(first, least.get(name, first))
    return Sizes(_beginning(shapes, least), deferred=True) if least else None


def _beginning(shapes: object, least: Mapping[str, int]) -> object:
    made: dict[str, Dim] = {}

    def larger(size: object) -> object:
        if not isinstance(size, Dim) or least.get(size.__name__, size.min) <= size.min:
            return size
        name = size.__name__
        return made.setdefault(name, Dim(name, min=least[name], max=size.max))

    return pytree.tree_map(larger, shapes)


def _named(dynamic: object) -> list:
    """The sizes that the user named: a name, or a name and a range."""
    return pytree.tree_leaves(dynamic, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], str))
