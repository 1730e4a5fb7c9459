"""Pipelines over gloo with two and four processes: what they compute is what one process does on the whole batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from launch import start
from models import Pictures, picture_batches, picture_loss, token_batches, token_loss
from pipe_ranks import ROWS, model_of, train, with_logits
from ranks import optimizer_of

import tessera

TWO = [
    ({"pp": 2}, {"pp": ("1f1b", ["blocks.1"])}, {"clip_norm": 0.5, "microbatches": 4}),
    ({"pp": 2}, "zero-bubble", {"accumulate": 2, "microbatches": 2}),
    ({"pp": 2}, "dualpipe", {}),
]
FOUR = [
    ({"dp": 2, "pp": 2}, {"dp": "zero3", "pp": "1f1b"}, {"clip_norm": 0.5}),
    ({"ep": 2, "pp": 2}, {"ep": "experts", "pp": "zero-bubble"}, {}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What processes wrote down; one launch of two and one of four serve all tests."""
    folder = tmp_path_factory.mktemp("pipes")
    for world, cases in ((2, TWO), (4, FOUR)):
        (folder / str(world)).mkdir()
        assert start(world, train, world, str(folder / str(world)), cases, world == 2) == [0] * world
    return folder


@cache
def eager(accumulate: int, clip: float | None, experts: bool) -> tuple[list[float], dict]:
    model = model_of(0, experts)
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


CASES = [(2, i, axes, options) for i, (axes, _, options) in enumerate(TWO)]
CASES += [(4, i, axes, options) for i, (axes, _, options) in enumerate(FOUR)]


@pytest.mark.parametrize(("world", "number", "axes", "options"), CASES)
def test_training(folder: Path, world: int, number: int, axes: dict, options: dict) -> None:
    """Every rank has the loss; together they have every weight, and where two have one it is the same."""
    losses, weights = eager(options.get("accumulate", 1), options.get("clip_norm"), "ep" in axes)
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


def close(got: dict, want: dict) -> None:
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-10, atol=1e-12)


def test_ranks_share_weights_and_state(folder: Path) -> None:
    """Each has its stages' alone; Adam's two slots of a weight lie where it is updated."""
    states = [torch.load(folder / "2" / f"0_{rank}.pt")[2]["state"] for rank in range(2)]
    assert sum(states) == 2 * sum(p.nbytes for p in model_of(0).parameters()) and max(states) < 0.7 * sum(states)


def test_bytes_on_the_wire(folder: Path) -> None:
    """Four calls of four microbatches: an activation goes on, one comes back, and the gradient of the tied weight."""
    activation, table = ROWS // 4 * 8 * 16 * 8, 48 * 16 * 8
    sent = [torch.load(folder / "2" / f"0_{rank}.pt")[2]["sent"] for rank in range(2)]
    assert sent == [16 * activation, 16 * (activation + table)]


def test_a_state_goes_from_pipeline_to_pipeline(folder: Path) -> None:
    model, other = model_of(0), model_of(5)
    by, again = optimizer_of(model), optimizer_of(other)
    for batch in token_batches(3, ROWS):
        by.zero_grad()
        token_loss(model, *batch).backward()
        by.step()
    tessera.load_state(folder / "2" / "saved", other, again)
    close(dict(other.named_parameters()), dict(model.named_parameters()))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        close(again.state[q], by.state[p])


def test_batches_of_another_size(folder: Path) -> None:
    model = model_of(0)
    by = optimizer_of(model)
    first, second = token_batches(2, ROWS)
    want = []
    for batch in (first, [x[:4] for x in second]):
        by.zero_grad()
        loss, logits = with_logits(model, *batch)
        loss.backward()
        by.step()
        want.append((loss.detach(), logits.detach()))
    grads = {}
    for rank in range(2):
        outs, weights, kept = torch.load(folder / "2" / f"changing_{rank}.pt")
        grads |= kept
        for got, x in zip(outs, want, strict=True):
            torch.testing.assert_close(got, x, rtol=1e-10, atol=1e-12)
        close(weights, {n: p.detach() for n, p in model.named_parameters() if n in weights})
    close(grads, {n: p.grad for n, p in model.named_parameters()})


def test_all_ranks_have_what_a_stage_wrote(folder: Path) -> None:
    torch.manual_seed(0)
    model = Pictures().double()
    by = optimizer_of(model)
    for batch in picture_batches(2):
        by.zero_grad()
        for part in zip(*(x.chunk(2) for x in batch), strict=True):
            (picture_loss(model, *part) / 2).backward()
        by.step()
    for rank in range(2):
        close(torch.load(folder / "2" / f"buffers_{rank}.pt"), dict(model.named_buffers()))
