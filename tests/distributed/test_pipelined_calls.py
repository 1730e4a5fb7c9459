"""`jit` over pipelines, with two and four processes: results, gradients and generated tokens are one process's."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import start

pytest.importorskip("transformers")

import pipe_calls  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What processes wrote down; one launch of two and one of four serve all tests."""
    folder = tmp_path_factory.mktemp("calls")
    for world, parts in ((2, pipe_calls.TWO), (4, pipe_calls.FOUR)):
        assert start(world, pipe_calls.run, world, str(folder), parts, seconds=240) == [0] * world
    return folder


CASES = [(2, part) for part in pipe_calls.TWO] + [(4, part) for part in pipe_calls.FOUR]


@pytest.mark.parametrize(("world", "part"), CASES)
def test_on_ranks(folder: Path, world: int, part: str) -> None:
    wrong = [folder / f"{part}_{rank}.txt" for rank in range(world)]
    assert not "\n".join(path.read_text() for path in wrong if path.exists())
    assert all((folder / f"done{world}_{rank}").exists() for rank in range(world))
