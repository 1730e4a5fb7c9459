"""The front door over gloo with two processes: what a mesh computes is what one process computes on the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import start
from models import token_batches, token_loss
from ranks import model_of, optimizer_of, train

import tessera

CASES = [
    ({"dp": 2}, "zero3"),
    ({"dp": 1, "tp": 2}, {"dp": "zero3", "tp": "sequence"}),
    ({"tp": 2}, {"tp": "tensor", "places.weight": "n, d/tp"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote down; one launch serves all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    assert start(2, train, 2, str(folder), CASES) == [0, 0]
    return folder


def eager(calls: int = 2, accumulate: int = 1, clip: float | None = None) -> tuple[list[float], dict, dict]:
    model = model_of(0)
    optimizer, losses, grads = optimizer_of(model), [], {}
    for i, batch in enumerate(token_batches(calls)):
        loss = token_loss(model, *batch)
        (loss / accumulate).backward()
        losses.append(float(loss.detach()))
        if (i + 1) % accumulate == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            grads = {name: p.grad for name, p in model.named_parameters()}
            optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}, grads


def close(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_training(folder: Path, number: int) -> None:
    losses, weights, _ = eager()
    mine, parts = torch.load(folder / f"{number}.pt")
    torch.testing.assert_close(mine, losses, rtol=1e-11, atol=0)
    close(parts, weights)


@pytest.mark.parametrize(("name", "rows"), [("jit", 4), ("rows", 2)])
def test_calls_of_a_sharded_model(folder: Path, name: str, rows: int) -> None:
    """Gradients are those of the sum of all ranks' losses; what is whole on all ranks counts once."""
    model = model_of(0)
    want = model(token_batches(1)[0][0])
    want.square().sum().backward()
    out, grads = torch.load(folder / f"{name}.pt")
    torch.testing.assert_close(out, want.detach()[:rows], rtol=1e-11, atol=1e-13)
    close(grads, {name: p.grad for name, p in model.named_parameters()})


def test_sums_of_gradients_lie_where_the_plan_splits_them(folder: Path) -> None:
    _, weights, grads = eager(4, 2, 0.5)
    mine, kept = torch.load(folder / "sums.pt")
    close(mine, weights)
    close(kept, grads)


def test_a_model_without_memory_is_made_shard_by_shard(folder: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 4))
    made = torch.load(folder / "meta.pt")
    for name, p in model.named_parameters():
        assert torch.equal(made[name], p.detach())


def test_a_state_goes_from_mesh_to_mesh(folder: Path) -> None:
    """Three meshes made a step each; one process loads what the last one saved."""
    _, weights, _ = eager(3)
    model = model_of(5)
    optimizer = optimizer_of(model)
    tessera.load_state(folder / "saved", model, optimizer)
    close({name: p.detach() for name, p in model.named_parameters()}, weights)
    assert all(float(optimizer.state[p]["step"]) == 3 for p in model.parameters())


def test_ranks_that_differ_say_so(folder: Path) -> None:
    """Sizes of batches, programs, and rows of ranks that should have the same, on both ranks."""
    for rank in range(2):
        sizes, model, program, rows, mesh, known, edited, options = (
            (folder / f"differing_{rank}.txt").read_text().splitlines()
        )
        assert "rank 1 has a batch of ['torch.int64 [1, 8]'], rank 0 ['torch.int64 [2, 8]']" in sizes
        assert "it has 'weight: torch.float32 [5, 4]', rank 0 'weight: torch.float32 [4, 4]'" in model
        assert "rank 1 has another program than rank 0: it has 'mul" in program and "ranks.py:" in program
        assert "ranks 0 and 1 stand at the same place of the data axes" in rows
        assert "first in tensor 0 of them, torch.int64 [4, 8]" in rows and "ranks.py:" in rows
        assert "rank 1 has another mesh than rank 0: it has 'dp=2 tp=1', rank 0 'dp=1 tp=2'" in mesh
        assert "rank 1 has a batch of ['torch.float32 [6, 4]'], rank 0 ['torch.float32 [4, 4]']" in known
        assert 'it has "all_reduce = dist.all_reduce(' in edited and 'rank 0 "reduce_scatter' in edited
        assert "edited_1.py:" in edited
        assert "rank 1 has an optimizer with ['lr=0.2, " in options and "rank 0 ['lr=0.1, " in options
        assert "ranks.py:" in options
