"""A buffer as the allocator sees it, and what no layout of several needs less than."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Bytes that are needed from one cycle until another."""

    size: int
    start: int
    end: int

    def meets(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end


def pressure(spans: Sequence[Span]) -> int:
    """The most bytes that live at once: no layout needs less."""
    changes = sorted([(s.start, 1, s.size) for s in spans] + [(s.end, 0, -s.size) for s in spans])
    live = most = 0
    for _, _, size in changes:
        live += size
        most = max(most, live)
    return most
