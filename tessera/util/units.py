"""Numbers for people: times, ratios, shares and counts. What is not there is an empty text."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e3)) if seconds * s >= 1), ("µs", 1e6))
    return f"{seconds * scale:.3g} {unit}"


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def counted(n: int, what: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{n:,} {what}" + ("" if n == 1 else "s")
