"""Sets of names, written as text so that a table of operators takes lines, not pages."""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    """`names("sin cos tan")` is the set of the three."""
    return frozenset(text.split())
