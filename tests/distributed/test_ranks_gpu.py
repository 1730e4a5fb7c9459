"""Ranks on a GPU: plans train as one process does, NCCL carries every exchange, a rank's program runs its kernels."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import GPT, Llama, MoE, token_batches, token_loss
from steps import compiled_step, pretended, program_of, train_ranks, train_whole
from torch import Tensor

import tessera
from tessera.distributed.communicator import bind
from tessera.ir.dist import on
from tessera.ir.verify import verify

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


def test_every_exchange(tmp_path, device: str = "cuda", backend: str = "nccl") -> None:  # noqa: ANN001
    """One rank: what comes in is what was sent."""
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        exchange = on(bind(tessera.mesh(device=device, dp=1))).communicator.exchange
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x = torch.arange(24, device=device).view(4, 6).to(dtype)
            rows = torch.tensor([3], device=device)
            came = {
                "all_gather": (exchange("all_gather", x, 1, "dp"), x),
                "reduce_scatter": (exchange("reduce_scatter", x.t(), 1, "dp"), x.t()),
                "all_reduce": (exchange("all_reduce", x, "dp"), x),
                "the largest": (exchange("all_reduce", x, "dp", "max"), x),
                "all_to_all": (exchange("all_to_all", x, 0, 1, "dp"), x),
                "permute": (exchange("permute", x.t(), "dp"), x.t()),
                "rows": (exchange("rows", x, rows, rows, "dp", 4), torch.cat([x[:3], torch.zeros_like(x[:1])])),
            }
            for name, (got, want) in came.items():
                assert got.dtype == dtype and got.device.type == device and torch.equal(got, want), name
    finally:
        dist.destroy_process_group()


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
