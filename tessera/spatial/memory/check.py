"""Proves a layout, whoever made it: every pair apart, within its region, aligned.

In: buffers with addresses and lifetimes. Out: nothing, or an error that names both buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.util.errors import TesseraError


class LayoutError(TesseraError, AssertionError):
    """Two buffers share bytes in the same cycles, or one lies where it must not."""


@dataclass(frozen=True)
class Laid:
    name: str
    address: int
    size: int
    start: int
    end: int


def check(buffers: Sequence[Laid], low: int, high: int, align: int) -> None:
    for b in buffers:
        if b.address % align:
            raise LayoutError(f"{b.name} begins at {b.address:#x}, which is no multiple of {align}")
        if b.address < low or b.address + b.size > high:
            raise LayoutError(f"{b.name} takes {b.address:#x} +{b.size}, beyond {low:#x}..{high:#x}")
    # A sweep over time: when a buffer begins to live, it is compared with all that live then.
    live: list[Laid] = []
    for b in sorted(buffers, key=lambda b: (b.start, b.end)):
        live = [other for other in live if other.end > b.start]
        for other in live:
            together = other.start < b.end and b.start < other.end
            if together and other.address < b.address + b.size and b.address < other.address + other.size:
                raise LayoutError(f"{other.name} and {b.name} share bytes from cycle {max(other.start, b.start)} on")
        live.append(b)
