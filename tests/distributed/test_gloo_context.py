"""Sequences and experts over gloo with two processes: what ranks compute is what one process computes on the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from context_ranks import CASES, model_of, train
from launch import start
from models import token_batches, token_loss
from ranks import optimizer_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    assert start(2, train, str(folder)) == [0, 0]
    return folder


@pytest.mark.parametrize("word", CASES)
def test_training(folder: Path, word: str) -> None:
    model = model_of(word)
    optimizer, losses = optimizer_of(model), []
    for batch in token_batches(2):
        loss = token_loss(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    mine, weights = torch.load(folder / f"{word}.pt")
    torch.testing.assert_close(mine, losses, rtol=1e-11, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights[name], p.detach(), rtol=1e-10, atol=1e-12)


def test_ranks_tell_how_rows_went(folder: Path) -> None:
    """All rows together are those of all ranks; each says what its own experts had."""
    told = [(folder / f"experts_{rank}.txt").read_text() for rank in range(2)]
    had = [int(text.split("this rank's experts had ")[1].split()[0]) for text in told]
    assert abs(sum(had) - 2 * 32) <= 1 and all("it sent 32" in text for text in told)
