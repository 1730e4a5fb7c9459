"""Some random programs on random machines; the script beside this tries a thousand."""

from __future__ import annotations

import pytest

from tests.spatial.optimum import ratios
from tests.spatial.random_programs import attempt


@pytest.mark.parametrize("start", range(0, 30, 5))
def test_random_programs(start: int) -> None:
    assert [problem for seed in range(start, start + 5) if (problem := attempt(seed))] == []


@pytest.mark.sweep
@pytest.mark.parametrize("start", range(30, 330, 30))
def test_more_random_programs(start: int) -> None:
    assert [problem for seed in range(start, start + 30) if (problem := attempt(seed))] == []


def test_small_schedules_are_nearly_the_shortest() -> None:
    pytest.importorskip("ortools", reason="CP-SAT is part of the extra plan")
    assert all(ratio <= 1.05 for _, ratio, _ in ratios(4, seed=7))
