"""Masks of truth values in a sharded step: writing by one is a choice, reading by one keeps all rows and counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from models import GPT, token_batches
from steps import train_whole
from strategies import plan_of
from torch import Tensor, nn

PLANS = [("ddp",), ("zero3", "tensor"), ("zero1", "sequence"), ("ring",), ("1f1b",)]


def written(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    logits = model(ids)
    logits[labels == 1] = 0.5
    each[labels == 0] = 0.0
    return each.mean() + logits.square().mean()


def counted(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """As the message says, in place of `logits[mask]`: rows that do not count keep their place."""
    logits, mask = model(ids), labels > 2
    return F.cross_entropy(logits.flatten(0, 1), labels.where(mask, -100).flatten()) + (
        logits.amax(-1).where(mask, 0).sum() / mask.sum()
    )


def read_counted(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    logits, mask = model(ids), labels > 2
    return F.cross_entropy(logits[mask], labels[mask]) + logits.amax(-1)[mask].mean()


def selected(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return model(ids).masked_select(labels[..., None] > 2).mean()


def spread(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    logits, mask = model(ids), labels > 2
    out = torch.zeros_like(logits)
    out[mask] = logits[mask] * 2
    return out.square().mean()


def trained(loss: Callable, words: tuple[str, ...]) -> tuple:
    torch.manual_seed(0)
    model, batches, plan = GPT(2).double(), token_batches(2), plan_of(words)
    return train_mesh(model, loss, batches, dict.fromkeys(plan, 2), plan), model, batches


@pytest.mark.parametrize("words", PLANS, ids="·".join)
def test_written_by_a_mask(words: tuple[str, ...]) -> None:
    mine, model, batches = trained(written, words)
    assert_equal(mine, train_whole(model, written, batches, "adam", None))


@pytest.mark.parametrize("words", PLANS, ids="·".join)
def test_rows_that_do_not_count_keep_their_place(words: tuple[str, ...]) -> None:
    mine, model, batches = trained(counted, words)
    assert_equal(mine, train_whole(model, read_counted, batches, "adam", None))


@pytest.mark.parametrize("words", PLANS, ids="·".join)
@pytest.mark.parametrize("loss", [read_counted, selected])
def test_rows_whose_number_data_decides(loss: Callable, words: tuple[str, ...]) -> None:
    mine, model, batches = trained(loss, words)
    assert_equal(mine, train_whole(model, loss, batches, "adam", None))


@pytest.mark.parametrize("words", PLANS, ids="·".join)
def test_rows_that_are_read_and_written(words: tuple[str, ...]) -> None:
    mine, model, batches = trained(spread, words)
    assert_equal(mine, train_whole(model, spread, batches, "adam", None))
