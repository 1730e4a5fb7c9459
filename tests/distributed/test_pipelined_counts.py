"""Losses that are means over what counts: a pipeline gives those of the whole batch, however labels lie."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from models import GPT, VOCABULARY, token_batches
from pipe_steps import pipelined_step
from steps import train_whole
from strategies import plan_of
from torch import Tensor, nn

WEIGHT = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)


def ignored(count: int) -> list[list[Tensor]]:
    """Batches of which whole rows are ignored: in some microbatches nothing counts."""
    rows = torch.tensor([True, True, True, False])[:, None]
    return [[ids, labels.masked_fill(rows | (labels % 3 == 0), -100)] for ids, labels in token_batches(count)]


def by_class(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).transpose(1, 2), labels)


def weighted(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return 2 * F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), weight=WEIGHT) + 1.0


def masked(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    logits, mask = model(ids), labels >= 0
    each = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1) + 0.1 * logits.square().mean()


def with_buffers(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Weights of classes are a buffer of the model, and so is which words count."""
    logits = model(ids)
    counts = F.embedding(labels.clamp(min=0), model.counts[:, None])[..., 0] * (labels >= 0)
    each = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=model.weight)
    return loss + (each * counts).sum() / counts.sum()


LOSSES = {"by class": by_class, "weighted": weighted, "masked": masked, "with buffers": with_buffers}


@pytest.mark.parametrize("words", [("1f1b",), ("zero3", "1f1b"), ("tensor", "1f1b")], ids="·".join)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_means_over_what_counts(loss, words: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, batches, plan = GPT(2).double(), ignored(2), plan_of(words)
    model.register_buffer("weight", WEIGHT)
    model.register_buffer("counts", (WEIGHT > 1).double())
    mine = train_mesh(model, loss, batches, dict.fromkeys(plan, 2), plan)
    assert_equal(mine, train_whole(model, loss, batches, "adam", None))


def test_a_mean_over_all_places_is_left_alone() -> None:
    def squares(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids).square().mean() + model(ids).abs().sum() / ids.numel()

    _, compilation = pipelined_step(GPT(2), squares, token_batches(1)[0][:1], {"pp": 2}, {"pp": "1f1b"}, microbatches=2)
    assert compilation.executable.counts is None
