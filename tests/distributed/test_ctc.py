"""Connectionist temporal classification on a mesh: sequences lie on several ranks, classes and times are gathered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from models import GPT, LENGTH, token_batches
from steps import compiled_step, program_of, train_whole
from strategies import plan_of
from torch import Tensor, nn

from tessera.ir.dist import exchange_of


def ctc(kind: str, reduction: str):  # noqa: ANN202
    def loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        logs, rows = model(ids).log_softmax(-1).transpose(0, 1), ids.shape[0]
        targets, lengths, wanted = labels[:, :3].clamp(min=1), LENGTH - ids[:, 0] % 3, labels[:, 0] % 4
        if kind == "numbers":
            lengths, wanted = [LENGTH] * rows, [3] * rows
        elif kind == "one after the other":
            targets, wanted = targets.flatten(), torch.full((rows,), 3)
        return F.ctc_loss(logs, targets, lengths, wanted, reduction=reduction, zero_infinity=kind == "rows").mean()

    return loss


@pytest.mark.parametrize("words", [("zero3",), ("ddp", "tensor"), ("ring",)], ids="·".join)
@pytest.mark.parametrize(
    "kind, reduction", [("rows", "mean"), ("rows", "none"), ("numbers", "sum"), ("one after the other", "mean")]
)
def test_trains_alike(kind: str, reduction: str, words: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, batches, plan, loss = GPT(1).double(), token_batches(2), plan_of(words), ctc(kind, reduction)
    mine = train_mesh(model, loss, batches, dict.fromkeys(plan, 2), plan)
    assert_equal(mine, train_whole(model, loss, batches, "adam", None))


def test_sequences_stay_where_they_are() -> None:
    step = compiled_step(GPT(1), ctc("rows", "mean"), token_batches(1)[0], {"dp": 2}, {"dp": "ddp"}, "sgd", None)
    trace = program_of(step[1])
    exchanges = [exchange for eqn in trace.equations if (exchange := exchange_of(eqn)) is not None]
    assert {name for name, _ in exchanges} == {"all_reduce"}
