"""Rows that a mask selects, over gloo: on every rank what eager gives, and the same gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import selected_ranks
from launch import start


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_gets_what_eager_gives(world: int, tmp_path: Path) -> None:
    codes = start(world, selected_ranks.run, world, str(tmp_path), seconds=240)
    assert not "".join(path.read_text() for path in tmp_path.glob("wrong_*.txt"))
    assert codes == [0] * world
