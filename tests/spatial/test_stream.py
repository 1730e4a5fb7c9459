"""Cycles beside the estimates of Stream, on its own example machines."""

from __future__ import annotations

import pytest

from tests.spatial.stream import MACHINES, mapped

QUICK = "tpu_like_quad_core"


@pytest.mark.parametrize("name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.sweep) for n in MACHINES])
def test_cycles_are_at_most_a_fifth_over_its_estimate(name: str) -> None:
    assert mapped(name).cycles <= 1.2 * MACHINES[name].estimate
