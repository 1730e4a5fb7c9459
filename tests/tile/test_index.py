"""Index expressions: how far neighbours along an axis are neighbours in memory."""

from __future__ import annotations

import pytest

from tessera.tile.dialect.index import parse


@pytest.mark.parametrize(
    ("text", "axis", "size", "run"),
    [
        ("i * 64 + r", "r", 64, 64),
        ("i * 64 + r", "i", 8, 1),
        ("i * 49 + r % 49 + r // 49 * 6272", "r", 490, 49),  # a flattened axis: a row of the inner one
        ("i * 49 + r % 49 + r // 49 * 49", "r", 490, 49),
        ("(p * 98 + r) % 49 + (p * 98 + r) // 49 * 7", "r", 98, 49),
        ("r % 49 * 2 + r // 49", "r", 490, 1),
        ("r * r", "r", 7, 1),
        ("r % n", "r", 7, 1),
        ("r % 6 + r // 4", "r", 24, 2),
    ],
)
def test_positions_side_by_side(text: str, axis: str, size: int, run: int) -> None:
    assert parse(text).run(axis, size) == run
