"""Cycles beside the estimates of Stream, on its own example machines."""

from __future__ import annotations

import pytest

from tests.spatial.stream import CASES

QUICK = ("tpu_like_quad_core", "convolutions")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case == QUICK else [pytest.mark.sweep], id=" ".join(case)) for case in CASES],
)
def test_cycles_are_at_most_its_estimate_and_a_fifth(case: tuple[str, str]) -> None:
    estimate, mapped = CASES[case]
    assert mapped(case[0]).cycles <= 1.2 * estimate
