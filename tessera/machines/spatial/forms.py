"""The forms that a number of a machine file may have.

In: a value as TOML gives it. Out: the plain value (bytes, hertz, tuples), or a `BadForm` that says what was expected. A
form is a function with a docstring: the docstring is what an error calls "expected".
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Form = Callable[[Any], Any]

PREFIXES = {
    "": 1, "u": Fraction(1, 10**6), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
LARGEST = 2**50


class BadForm(ValueError):
    """A value that has not the form of its field; the message says what was expected."""


def _refuse(expected: str) -> BadForm:
    return BadForm(expected)


def whole(least: int, most: int = LARGEST) -> Form:
    def form(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _refuse(f"a whole number, {least} or more and at most {most}")
        return value

    return form


def quantity(unit: str, least: float = 0, *, exact: bool = False, most: float = LARGEST) -> Form:
    """A number with a unit, "64 KiB"; `exact` ones are whole numbers of the unit."""

    pattern = re.compile(rf"([0-9]{{1,15}}(?:\.[0-9]{{1,9}})?) ({'|'.join(PREFIXES)}){unit}")

    def form(value: object) -> float:
        match = pattern.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise _refuse(f'a number with its unit, such as "16 {unit}" or "1.5 M{unit}"')
        number = Fraction(match[1]) * PREFIXES[match[2]]
        if not least <= number <= most or (exact and number.denominator != 1):
            kind = "a whole number of " if exact else ""
            raise _refuse(f"{kind}{unit}, {least:g} or more and at most {most:g}")
        return int(number) if exact else float(number)

    return form


def size(value: object) -> int:
    return int(quantity("B", 1, exact=True)(value))


def choice(*words: str) -> Form:
    def form(value: object) -> str:
        if value not in words:
            raise _refuse(f"one of {', '.join(words)}")
        return str(value)

    return form


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse("true or false")
    return value


def _place(value: object, lengths: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) not in lengths:
        raise _refuse("places such as [0, 1]: row, column (or chip, row, column)")
    if any(type(x) is not int or not 0 <= x < 2**20 for x in value):
        raise _refuse("places of whole numbers, 0 or more")
    return tuple(value)


def grid(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or any(type(x) is not int or not 1 <= x < 2**16 for x in value):
        raise _refuse("[rows, columns], each 1 or more and at most 65535")
    return value[0], value[1]


def places(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        raise _refuse("a list of places, such as [[0, 0], [0, 1]]")
    return tuple(_place(place, (2, 3)) for place in value)


def links(value: object) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    if not isinstance(value, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in value):
        raise _refuse("a list of pairs of places, such as [[[0, 0], [0, 1]]]")
    return tuple((_place(a, (2, 3)), _place(b, (2, 3))) for a, b in value)


def table(least: float, *names: str) -> Form:
    """Numbers by name: `{ float32 = 4, default = 1 }`; without `names` any name goes."""

    def form(value: object) -> dict[str, float]:
        if not isinstance(value, dict) or not value:
            raise _refuse(f"a table of numbers, such as {{ {names[0] if names else 'default'} = 1 }}")
        for name, number in value.items():
            if names and name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise _refuse(f"names out of {', '.join(names)}; {name} is none{hint}")
            if type(number) not in (int, float) or not least <= number <= LARGEST:
                raise _refuse(f"numbers of {least:g} or more; {name} is {number}")
        return dict(value)

    return form
