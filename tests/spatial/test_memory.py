"""Addresses from lifetimes: near the least that any layout needs, and proven by a checker of its own."""

from __future__ import annotations

import itertools
import random

import pytest

from tessera.spatial import solvers
from tessera.spatial.memory import canonical, exact
from tessera.spatial.memory.allocate import Placed, _greedy, _neighbours, _orders, _urgent, allocate
from tessera.spatial.memory.check import Laid, LayoutError, check
from tessera.spatial.memory.span import Span, pressure
from tessera.spatial.solvers import missing
from tessera.util.errors import OptionError
from tests.spatial.lifetimes import least, prove, random_spans
from tests.spatial.test_solvers import without


def test_layouts_are_proven_and_least() -> None:
    for seed in range(60):
        spans = random_spans(seed, 3 + seed % 28)
        placed = allocate(spans)
        prove(spans, placed)
        assert placed.height >= pressure(spans)
        assert placed.proven, f"seed {seed}: {placed.height} over {pressure(spans)}"


@pytest.mark.skipif(bool(missing("ortools")), reason="CP-SAT is part of the extra plan")
def test_a_solver_agrees() -> None:
    for seed in range(100):
        spans = random_spans(seed, 3 + seed % 28)
        placed = allocate(spans)
        assert least(spans, placed) == placed.height


def _lowest_by_hand(spans: list[Span]) -> int:
    """The least height over all orders of the greedy rule, one of which gives the lowest layout."""
    lowest = sum(s.size for s in spans)
    for order in itertools.permutations(spans):
        tops: list[tuple[Span, int]] = []
        for s in order:
            at = 0
            for other, low in sorted(tops, key=lambda pair: pair[1]):
                if s.meets(other):
                    if low - at >= s.size:
                        break
                    at = max(at, low + other.size)
            tops.append((s, at))
        lowest = min(lowest, max(at + s.size for s, at in tops))
    return lowest


def test_the_canonical_search_finds_what_all_orders_find() -> None:
    over = 0
    for seed in range(40):
        spans = [Span(s.size, s.start // 8, s.end // 8 + 1) for s in random_spans(seed, 6)]
        lowest = _lowest_by_hand(spans)
        over += lowest > pressure(spans)
        addresses = canonical.fit(spans, lowest, 10_000)
        assert addresses is not None
        check([Laid(str(i), a, s.size, s.start, s.end) for i, (s, a) in enumerate(zip(spans, addresses, strict=True))],
              0, lowest, 1)  # fmt: skip
        assert canonical.fit(spans, lowest - 32, 10_000) is None
    assert allocate([]).height == 0


def _cut_up(seed: int, count: int) -> list[Span]:
    """A full memory, cut into so many buffers: it has a layout without a hole."""
    chance = random.Random(seed)
    boxes = [(0, 1024, 0, 512)]
    while len(boxes) < count:
        low, high, start, end = boxes.pop(chance.randrange(len(boxes)))
        if chance.random() < 0.5 and high - low > 1:
            at = chance.randrange(low + 1, high)
            boxes += [(low, at, start, end), (at, high, start, end)]
        elif end - start > 1:
            at = chance.randrange(start + 1, end)
            boxes += [(low, high, start, at), (low, high, at, end)]
        else:
            boxes.append((low, high, start, end))
    chance.shuffle(boxes)
    return [Span(32 * (high - low), start, end) for low, high, start, end in boxes]


def test_the_canonical_search_fills_a_memory_that_was_cut_up() -> None:
    for seed in range(8):
        spans = _cut_up(seed, 100)
        addresses = canonical.fit(spans, 1024 * 32, 20_000)
        assert pressure(spans) == 1024 * 32 and addresses is not None
        prove(spans, Placed(addresses, 1024 * 32))


# At most 4 units live at once, and no layout has that height.
UNITS = [(1, 3, 7), (3, 6, 7), (3, 1, 2), (2, 5, 6), (1, 2, 6), (1, 4, 5), (1, 3, 4), (1, 1, 5), (2, 0, 1), (2, 2, 3),
         (2, 0, 1)]  # fmt: skip


def test_a_set_that_needs_more_than_lives_at_once() -> None:
    spans = [Span(32 * size, start, end) for size, start, end in UNITS]
    placed = allocate(spans)
    assert pressure(spans) == 128 and placed.height == 160 and placed.proven
    assert canonical.fit(spans, 128, 10_000) is None


def _fits(spans: list[Span], height: int, laid: tuple[int, ...] = ()) -> bool:
    """Whether any addresses at all will do: all are tried."""
    if len(laid) == len(spans):
        return True
    span = spans[len(laid)]
    beside = [(a, s.size) for a, s in zip(laid, spans, strict=False) if s.meets(span)]
    free = (at for at in range(height - span.size + 1) if all(at + span.size <= a or a + n <= at for a, n in beside))
    return any(_fits(spans, height, (*laid, at)) for at in free)


def test_a_proof_that_there_is_no_layout_is_one() -> None:
    found = []
    for seed in range(60):
        chance, sets = random.Random(seed), [list(unit) for unit in UNITS]
        for _ in range(seed % 4):
            changed = chance.choice(sets)
            changed[2] += chance.randrange(2)
            changed[0] = max(changed[0] + chance.choice((-1, 0, 1)), 1)
        spans = sorted((Span(*unit) for unit in sets), key=lambda s: s.start)
        found.append(canonical.fit(spans, pressure(spans), 20_000) is not None)
        assert found[-1] == _fits(spans, pressure(spans)), f"seed {seed}"
    assert 10 < sum(found) < 50


def test_buffers_that_stand_too_high_become_urgent() -> None:
    lower = 0
    for seed in range(20):
        spans = random_spans(seed, 80)
        before = min((_greedy(spans, order, _neighbours(spans)) for order in _orders(spans)), key=lambda p: p.height)
        placed = _urgent(spans, _neighbours(spans), before, pressure(spans), random.Random(0), 120)
        prove(spans, placed)
        lower += placed.height < before.height
    assert lower > 10


def test_a_search_without_budget_says_so() -> None:
    with pytest.raises(canonical.Unknown):
        canonical.fit(random_spans(1, 30), pressure(random_spans(1, 30)), 3)


def test_a_solver_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "_found", without)
    with pytest.raises(OptionError, match="pip install tessera.plan"):
        exact.solve(random_spans(1, 3), 1, 2)


def test_the_checker_refuses() -> None:
    a, b = Laid("a", 0, 64, 0, 10), Laid("b", 32, 64, 9, 20)
    with pytest.raises(LayoutError, match="a and b share bytes from cycle 9"):
        check([a, b], 0, 1024, 32)
    check([a, Laid("b", 32, 64, 10, 20)], 0, 1024, 32)
    with pytest.raises(LayoutError, match="no multiple"):
        check([Laid("c", 8, 8, 0, 1)], 0, 1024, 32)
    with pytest.raises(LayoutError, match="beyond"):
        check([Laid("c", 1024, 8, 0, 1)], 0, 1024, 32)


@pytest.mark.skipif(bool(missing("ortools")), reason="CP-SAT is part of the extra plan")
def test_a_solver_keeps_addresses_aligned() -> None:
    for seed in range(20):
        spans = random_spans(seed, 8)
        most = sum(s.size for s in spans) + 32
        addresses, proven = exact.solve(spans, pressure(spans), most)
        assert addresses is not None and proven and all(a % 32 == 0 for a in addresses)
