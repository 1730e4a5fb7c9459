"""Random plans on random meshes train as one process does; `random_plans.py` tries more of them."""

from __future__ import annotations

import pytest
from random_plans import check, random_case

ALWAYS, EVERY = 4, 50


@pytest.mark.parametrize(
    "seed", [*range(ALWAYS), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(ALWAYS, EVERY))]
)
def test_random_plans(seed: int) -> None:
    check(random_case(seed))
