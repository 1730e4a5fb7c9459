"""How long Python's regular expressions may take. ONNX means RE2's, which never look back; Python's do.

In: a pattern of a file and the length of a text. Out: a bound on the steps that matching takes. A repeat tries every
end that it may have: repeats that stand behind each other multiply, and one that holds a choice is tried for every way
to share the text out, which doubles with each character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MOST_STEPS = 1 << 24
_parser = re._parser  # type: ignore[attr-defined]
_REPEATS = {_parser.MAX_REPEAT, _parser.MIN_REPEAT}
_CHOICES = {_parser.BRANCH, _parser.GROUPREF_EXISTS, _parser.GROUPREF}


def steps(pattern: str, length: int) -> int:
    factor, doubles = _cost(_parser.parse(pattern), max(length, 1))
    return factor * 2 ** min(length, 64) if doubles else factor


def _cost(parsed: Iterable, length: int) -> tuple[int, bool]:
    """How many ways there are, and whether each character doubles them."""
    factor, doubles = length, False
    for kind, argument in parsed:
        if kind in _REPEATS:
            most = min(int(argument[1]), length)
            inner, nested = _cost(argument[2], length)
            factor *= most + 1
            doubles |= most > 1 and (nested or inner > length or _chooses(argument[2]))
        else:
            for part in _parts(argument):
                inner, nested = _cost(part, length)
                factor, doubles = max(factor, factor * inner // length), doubles or nested
    return factor, doubles


def _chooses(parsed: Iterable) -> bool:
    return any(kind in _CHOICES or any(map(_chooses, _parts(argument))) for kind, argument in parsed)


def _parts(argument: object) -> list:
    """The patterns inside an argument of a parsed one."""
    if isinstance(argument, _parser.SubPattern):
        return [argument]
    if isinstance(argument, (tuple, list)):
        return [part for inner in argument for part in _parts(inner)]
    return []
