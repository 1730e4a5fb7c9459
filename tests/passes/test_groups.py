"""Groups of equations against a search of all paths, on small random programs."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from tessera.passes.fuse.graph import Groups


def _needs(number: int, seed: int) -> list[set[int]]:
    """Equations that read a few of those before them, mostly near ones."""
    draw = random.Random(seed)
    reach = draw.choice((3, 8, number))
    return [
        {draw.randrange(max(0, i - reach), i) for _ in range(draw.randrange(4))} if i else set() for i in range(number)
    ]


def _below(groups: Groups, start: int) -> set[int]:
    """All groups that a path leads to."""
    reached: set[int] = set()
    stack = [start]
    while stack:
        for g in groups.after[stack.pop()] - reached:
            reached.add(g)
            stack.append(g)
    return reached


def _comes_back(groups: Groups, chosen: set[int]) -> bool:
    outside = {p for g in chosen for p in _below(groups, g)} - chosen
    return any(_below(groups, p) & chosen for p in outside)


@pytest.mark.parametrize("seed", range(20))
def test_groups_know_every_path(seed: int) -> None:
    draw = random.Random(seed)
    groups = Groups(_needs(24, seed))
    joined = 0
    for _ in range(60):
        if len(groups.members) < 4:
            break
        chosen = set(draw.sample(sorted(groups.members), draw.choice((2, 2, 3))))
        convex = not _comes_back(groups, chosen)
        assert groups.convex(chosen) == convex
        apart = all(b not in _below(groups, a) and a not in _below(groups, b) for a, b in combinations(chosen, 2))
        assert groups.independent(chosen) == apart
        if convex:
            joined += 1
            assert groups.join(chosen) == min(chosen)
            assert all(groups.place[p] < groups.place[g] for g, before in groups.before.items() for p in before)
            assert sorted(i for members in groups.members.values() for i in members) == list(range(24))
    assert joined


def test_a_set_that_a_path_leaves_is_not_joined() -> None:
    groups = Groups([set(), {0}, {1}])  # 0 -> 1 -> 2
    assert not groups.convex({0, 2})
    with pytest.raises(AssertionError, match="back in"):
        groups.join({0, 2})
