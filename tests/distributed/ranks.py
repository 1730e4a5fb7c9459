"""What a rank of a gloo group does in tests. Run by `torch.multiprocessing`, a process each."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from models import GPT, token_batches, token_loss

import tessera
from tessera.distributed import in_step
from tessera.ir.dist import on
from tessera.ir.mesh import Mesh


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return GPT(1).double()


def train(rank: int, world: int, folder: str, cases: list[tuple[dict, object]]) -> None:
    """Every plan in turn; rank 0 writes down losses and whole weights."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")  # whatever the host is called
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    for number, (axes, plan) in enumerate(cases):
        mesh = tessera.mesh(device="cpu", **axes)
        model = model_of(rank)  # what rank 0 has counts
        step = tessera.train_step(model, token_loss, optimizer_of(model), executors="aten", mesh=mesh, plan=plan)
        parts, own = axes.get("dp", 1), mesh.get_local_rank("dp") if "dp" in axes else 0
        losses = [float(step(*(x.chunk(parts)[own] for x in batch))) for batch in token_batches(2)]
        weights = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
        if rank == 0:
            torch.save((losses, weights), Path(folder) / f"{number}.pt")
    exchange(rank, world)
    dist.destroy_process_group()


def exchange(rank: int, world: int) -> None:
    """Collectives over gloo are those of the interpreter."""
    tessera.mesh(device="cpu", x=world)
    mesh = Mesh.of(x=world)
    whole = torch.arange(24.0).reshape(4, 6) + 1
    parts = [whole * (r + 1) for r in range(world)]
    for name, *args in (
        ("all_gather", 1, "x"), ("all_gather", 0, "x", 7), ("reduce_scatter", 1, "x"), ("reduce_scatter", 0, "x"),
        ("all_reduce", "x"), ("all_reduce", "x", "max"), ("all_to_all", 0, 1, "x"), ("all_to_all", 1, 0, "x"),
        ("permute", "x", 1), ("slice", 0, "x"), ("once", "x"), ("fill", 0, 7, ("x",), 5.0),
    ):  # fmt: skip
        op = getattr(on(mesh), name)
        want = in_step.together(op, [(x, *args) for x in parts])[rank]
        torch.testing.assert_close(op.fn(parts[rank], *args), want, rtol=0, atol=0)


def launch(world: int, folder: str, cases: list) -> None:
    multiprocessing.spawn(train, (world, folder, cases), nprocs=world)
