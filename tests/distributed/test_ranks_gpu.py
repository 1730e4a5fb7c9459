"""Ranks on a GPU: plans train as one process does, NCCL carries every exchange, a rank's program runs its kernels."""

from __future__ import annotations

import pytest
import torch
from models import GPT, Llama, MoE, token_batches, token_loss
from steps import compiled_step, pretended, program_of, train_ranks, train_whole
from torch import Tensor

import tessera
from tessera.ir.verify import verify
from tessera.tools.bench import one_rank

pytestmark = pytest.mark.gpu

PLANS = {
    "zero3": (GPT, {"dp": 2}, "zero3"),
    "zero3 · sequence": (Llama, {"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "sequence"}),
    "ring": (GPT, {"cp": 2}, "ring"),
    "ulysses": (Llama, {"cp": 2}, "ulysses"),
    "zero1 · experts": (MoE, {"dp": 2, "ep": 2}, {"dp": "zero1", "ep": "experts"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_all_ranks_train_as_one_process(name: str, device: str = "cuda") -> None:
    make, axes, plan = PLANS[name]
    torch.manual_seed(0)
    model = make().double().to(device)
    batches = [[x.to(device) for x in batch] for batch in token_batches(3)]
    step, compilation = compiled_step(model, token_loss, batches[0], axes, plan, "adam", None)
    verify(program_of(compilation))
    mine = train_ranks(model, step, compilation, batches, exact=False)
    want = train_whole(model, token_loss, batches, "adam", None)
    pairs = [*zip(mine.losses, want.losses, strict=True), *((mine.held[n], x) for n, x in want.held.items())]
    for got, x in pairs:
        assert (got - x).norm() <= 1e-10 * x.norm() + 1e-12


def test_every_exchange() -> None:
    """One rank: what comes in is what was sent."""
    told = one_rank.exchanges("cuda", "nccl")
    assert all(told.values()), told


@pytest.mark.parametrize("plan", ["zero3", "sequence"])
def test_a_rank_alone_runs_its_kernels(plan: str, device: str = "cuda") -> None:
    """Rank 0 of a group that does not exist: exchanges bring whatever lay in memory, so values say nothing."""
    torch.manual_seed(0)
    model = Llama().to(device)
    ids, labels = (x[:4].to(device) for x in token_batches(1)[0])

    def loss_fn(model: torch.nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return token_loss(model, ids, labels)

    with pretended({"dp": 2}, device) as mesh:
        tessera.shard(model, mesh, plan)
        step = tessera.train_step(model, loss_fn, torch.optim.AdamW(model.parameters()))
        losses = [step(ids, labels) for _ in range(3)]
    assert all(loss.device.type == device and loss.shape == () for loss in losses)
    assert all(p.to_local().device.type == device for p in model.parameters())
