"""What a program may ask for. In: sizes that a file states. Out: nothing, or an error that says which limit.

A file is somebody else's input: a few bytes can describe terabytes. A value may take what the program's own bytes and
its arguments justify; whoever trusts a file more says so (`tessera.stablehlo.load(…, limit=…)`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.util.errors import InputError

BRACKETS = 200  # how deep brackets may nest in text: readers of such text recurse
REGIONS = 64  # how deep regions may nest
CALLS = 200  # how deep functions may call each other
EXPANDED = 32  # operations for each of the file's, where functions stand in the places of their calls
LEAST_OPERATIONS = 64  # a file with fewer is taken for one of so many
ATTRIBUTE = 1 << 16  # elements of a tensor that is an attribute and no constant: padding, groups of replicas
FILE_BYTES = 1 << 34
VALUE_BYTES = 1 << 28  # of one value, whatever the file's size
PER_BYTE = 64  # so many bytes of one value for each byte that was given


def value_limit(given: int) -> int:
    """The most bytes that one value may take where the file and the arguments have `given`."""
    return max(VALUE_BYTES, PER_BYTE * given)


def check_value(shape: Sequence[int], width: int, limit: float, where: str) -> None:
    """Refuse a shape whose tensor would be larger than the limit. Sizes that are symbols are not looked at."""
    count = math.prod(n for n in shape if isinstance(n, int))
    if count * width > limit:
        raise InputError(
            f"{where}: expected values of at most {limit:,} bytes, got a shape {tuple(shape)} of {count * width:,}; "
            "pass limit= to load if that is meant"
        )


def check_text(text: str, name: str) -> None:
    """Refuse text whose brackets nest so deep that a recursive reader would run out of stack."""
    depth = 0
    for character in text:
        if character in "([{<":
            depth += 1
            if depth > BRACKETS:
                raise InputError(f"{name}: expected brackets nested at most {BRACKETS} deep, got more")
        elif character in ")]}>":
            depth = max(depth - 1, 0)
