"""Pipelines over gloo with two and four processes: what they compute is what one process does on the whole batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from models import token_batches, token_loss
from pipe_ranks import ROWS, launch, model_of
from ranks import optimizer_of

TWO = [
    ({"pp": 2}, "gpipe", {}),
    ({"pp": 2}, {"pp": ("1f1b", ["blocks.1"])}, {"clip_norm": 0.5, "microbatches": 4}),
    ({"pp": 2}, "interleaved", {}),
    ({"pp": 2}, "zero-bubble", {"accumulate": 2, "microbatches": 2}),
    ({"pp": 2}, "dualpipe", {}),
]
FOUR = [
    ({"dp": 2, "pp": 2}, {"dp": "zero3", "pp": "1f1b"}, {}),
    ({"pp": 2, "tp": 2}, {"pp": "zero-bubble", "tp": "sequence"}, {"clip_norm": 0.5}),
    ({"pp": 4}, "1f1b", {}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What processes wrote down; one launch of two and one of four serve all tests."""
    folder = tmp_path_factory.mktemp("pipes")
    for world, cases in ((2, TWO), (4, FOUR)):
        (folder / str(world)).mkdir()
        launch(world, str(folder / str(world)), cases, world == 2)
    return folder


@cache
def eager(accumulate: int, clip: float | None) -> tuple[list[float], dict]:
    model = model_of(0)
    optimizer, losses = optimizer_of(model), []
    for i, batch in enumerate(token_batches(4, ROWS)):
        loss = token_loss(model, *batch)
        (loss / accumulate).backward()
        losses.append(float(loss.detach()))
        if (i + 1) % accumulate == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


CASES = [(2, i, options) for i, (_, _, options) in enumerate(TWO)] + [(4, i, o) for i, (_, _, o) in enumerate(FOUR)]


@pytest.mark.parametrize(("world", "number", "options"), CASES)
def test_training(folder: Path, world: int, number: int, options: dict) -> None:
    """Every rank has the loss; together they have every weight, and where two have one it is the same."""
    losses, weights = eager(options.get("accumulate", 1), options.get("clip_norm"))
    seen = {}
    for rank in range(world):
        mine, held, _ = torch.load(folder / str(world) / f"{number}_{rank}.pt")
        torch.testing.assert_close(mine, losses, rtol=1e-11, atol=0)
        assert len(held) < len(weights)
        for name, x in held.items():
            assert torch.equal(seen.setdefault(name, x), x)
    assert seen.keys() == weights.keys()
    for name, x in weights.items():
        torch.testing.assert_close(seen[name], x, rtol=1e-10, atol=1e-12)
