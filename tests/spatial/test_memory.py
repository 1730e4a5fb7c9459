"""Addresses from lifetimes: near the least that any layout needs, and proven by a checker of its own."""

from __future__ import annotations

import random

import pytest

from tessera.spatial.memory import exact
from tessera.spatial.memory.allocate import Span, allocate, pressure
from tessera.spatial.memory.check import Laid, LayoutError, check


def spans(seed: int, count: int) -> list[Span]:
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        start = chance.randrange(100)
        found.append(Span(32 * chance.randrange(1, 20), start, start + chance.randrange(1, 40)))
    return found


def prove(given: list[Span], addresses: list[int], height: int) -> None:
    check(
        [Laid(str(i), a, s.size, s.start, s.end) for i, (s, a) in enumerate(zip(given, addresses, strict=True))],
        0,
        height,
        32,
    )


def test_layouts_are_proven_and_low() -> None:
    heights, least = [], []
    for seed in range(60):
        given = spans(seed, 3 + seed % 28)
        placed = allocate(given)
        prove(given, placed.addresses, placed.height)
        heights.append(placed.height)
        least.append(pressure(given))
    assert all(h >= p for h, p in zip(heights, least, strict=True))
    assert sum(h == p for h, p in zip(heights, least, strict=True)) >= 50
    assert max(h / p for h, p in zip(heights, least, strict=True)) <= 1.25


@pytest.mark.skipif(not exact.available(), reason="ortools is not installed")
def test_nearly_all_are_optimal() -> None:
    best = 0
    for seed in range(100):
        given = spans(seed, 3 + seed % 28)
        height = allocate(given).height
        best += height == pressure(given) or exact.solve(given, pressure(given), height) is None
    assert best >= 95


def test_the_checker_refuses() -> None:
    a, b = Laid("a", 0, 64, 0, 10), Laid("b", 32, 64, 9, 20)
    with pytest.raises(LayoutError, match="a and b share bytes from cycle 9"):
        check([a, b], 0, 1024, 32)
    check([a, Laid("b", 32, 64, 10, 20)], 0, 1024, 32)
    with pytest.raises(LayoutError, match="no multiple"):
        check([Laid("c", 8, 8, 0, 1)], 0, 1024, 32)
    with pytest.raises(LayoutError, match="beyond"):
        check([Laid("c", 1024, 8, 0, 1)], 0, 1024, 32)
