"""What a rank of a gloo group with a pipeline does in tests. Run by `torch.multiprocessing`, a process each."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from models import GPT, token_batches, token_loss
from ranks import optimizer_of

import tessera
from tessera.distributed.weights import local_of

ROWS = 8


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return GPT(2).double()


def launch(world: int, folder: str, cases: list, then: bool) -> None:
    multiprocessing.spawn(train, (world, folder, cases, then), nprocs=world)


def train(rank: int, world: int, folder: str, cases: list[tuple[dict, object, dict]], then: bool) -> None:
    """Every plan in turn; losses of all ranks, and whole weights, are written down."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")  # whatever the host is called
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    for number, (axes, plan, options) in enumerate(cases):
        mesh = tessera.mesh(device="cpu", **axes)
        model = model_of(rank)  # what rank 0 has counts
        step = tessera.train_step(
            model, token_loss, optimizer_of(model), executors="aten", mesh=mesh, plan=plan, **options
        )  # fmt: skip
        parts, own = axes.get("dp", 1), mesh.get_local_rank("dp") if "dp" in axes else 0
        losses = [float(step(*(x.chunk(parts)[own] for x in batch))) for batch in token_batches(4, ROWS)]
        torch.save((losses, whole(model), told(step)), Path(folder) / f"{number}_{rank}.pt")
    dist.destroy_process_group()


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that this rank has."""
    return {n: p.detach().full_tensor() for n, p in model.named_parameters() if not local_of(p).is_meta}


def told(step: object) -> dict:
    """What a rank holds and has sent along the pipeline."""
    (program,) = step.programs.values()
    state = step.state.optimizer.state
    slots = [x for slots in state.values() for x in slots.values() if x.ndim and not local_of(x).is_meta]
    return {"sent": program.channel.bytes_sent, "state": sum(local_of(x).nbytes for x in slots)}
