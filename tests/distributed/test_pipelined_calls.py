"""`jit` over pipelines, with two and four processes: results, gradients and generated tokens are one process's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from launch import start

pytest.importorskip("transformers")

import pipe_calls  # noqa: E402

SWEPT = pytest.mark.sweep  # four processes, and what is kept on the disk
CASES = [
    *(pytest.param(2, part, marks=SWEPT if part == "stored" else ()) for part in pipe_calls.TWO),
    *(pytest.param(4, part, marks=SWEPT) for part in pipe_calls.FOUR),
]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[int], Path]:
    """What processes wrote down; one launch of two and one of four serve all tests that were asked for."""
    asked = [item.callspec.params for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]

    @cache
    def launch(world: int) -> Path:
        folder = tmp_path_factory.mktemp(f"calls{world}")
        parts = [params["part"] for params in asked if params["world"] == world]
        assert start(world, pipe_calls.run, world, str(folder), parts, seconds=240) == [0] * world
        return folder

    return launch


@pytest.mark.parametrize(("world", "part"), CASES)
def test_on_ranks(launched: Callable[[int], Path], world: int, part: str) -> None:
    folder = launched(world)
    wrong = [folder / f"{part}_{rank}.txt" for rank in range(world)]
    assert not "\n".join(path.read_text() for path in wrong if path.exists())
    assert all((folder / f"done{world}_{rank}").exists() for rank in range(world))
