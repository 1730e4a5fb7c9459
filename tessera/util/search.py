"""Bisection."""

from __future__ import annotations

from collections.abc import Callable


def first_that_fits(count: int, fits: Callable[[int], bool]) -> int | None:
    """The least number below `count` that fits, where all above it do; None where none does."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low if low < count else None
