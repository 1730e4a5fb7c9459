"""Programs that others wrote for many ranks, over gloo with two processes: what eager PyTorch computes is computed."""

from __future__ import annotations

from pathlib import Path

import interop_ranks
import pytest
import torch
from launch import start
from steps import pretended
from torch.distributed._functional_collectives import all_reduce

import tessera


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote down; one launch serves all tests."""
    folder = tmp_path_factory.mktemp("interop")
    assert start(2, interop_ranks.run, str(folder), seconds=240) == [0, 0]
    return folder


@pytest.mark.parametrize("part", [part.__name__ for part in interop_ranks.PARTS])
def test_on_two_ranks(folder: Path, part: str) -> None:
    assert (folder / "done_0").exists() and (folder / "done_1").exists()
    wrong = [(folder / f"{part}_{rank}.txt") for rank in range(2)]
    assert not "\n".join(path.read_text() for path in wrong if path.exists())


def test_averages() -> None:
    """Gloo has none; ranks that do not exist give back what they are given."""
    with pretended({"dp": 2}) as mesh:
        group = mesh.get_group()
        fast = tessera.jit(lambda x: all_reduce(x * 2, "avg", group).sin(), executors="aten", strict=True)
        x = torch.randn(3, requires_grad=True)
        fast(x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * (2 * x).cos())
        (compilation,) = fast.__tessera__.compilations()
        backward = compilation.account.programs[1].trace
        assert [eqn.args[1] for eqn in backward.equations if eqn.opname == "all_reduce"] == ["avg"]
