"""What a rank of a gloo group with a pipeline does in tests."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from launch import join_group
from models import GPT, MoE, Pictures, picture_batches, picture_loss, token_batches, token_loss
from ranks import optimizer_of

import tessera
from tessera.distributed.weights import local_of

ROWS = 8


def model_of(seed: int, experts: bool = False) -> torch.nn.Module:
    torch.manual_seed(seed)
    return (MoE if experts else GPT)(2).double()


def train(rank: int, world: int, folder: str, cases: list[tuple[dict, object, dict]], then: bool) -> None:
    """Every plan in turn; losses of all ranks, and whole weights, are written down."""
    join_group(rank, world, f"{folder}/meet")
    for number, (axes, plan, options) in enumerate(cases):
        mesh = tessera.mesh(device="cpu", **axes)
        model = model_of(rank, "ep" in axes)  # what rank 0 has counts
        step = tessera.train_step(
            model, token_loss, optimizer_of(model), executors="aten", mesh=mesh, plan=plan, **options
        )  # fmt: skip
        rows = [axis for axis in ("dp", "ep") if axis in axes]
        parts, own = (axes[rows[0]], mesh.get_local_rank(rows[0])) if rows else (1, 0)
        losses = [float(step(*(x.chunk(parts)[own] for x in batch))) for batch in token_batches(4, ROWS)]
        torch.save((losses, whole(model), told(step)), Path(folder) / f"{number}_{rank}.pt")
    for part in (saved, changing, written) if then else ():
        part(rank, Path(folder))
    dist.destroy_process_group()


def saved(rank: int, folder: Path) -> None:
    """A state goes from one pipeline to the next: loaded before the first call, and after it."""
    for number, word in enumerate(("1f1b", "dualpipe", "zero-bubble")):
        model = tessera.shard(model_of(rank + number), tessera.mesh(device="cpu", pp=2), word)
        optimizer = optimizer_of(model)
        step = tessera.train_step(model, token_loss, optimizer, executors="aten")
        if number == 2:
            step(*token_batches(1, ROWS)[0])  # from now on other stages' weights are gone
        if number:
            tessera.load_state(folder / "saved", model, optimizer)
        step(*token_batches(3, ROWS)[number])
        tessera.save_state(folder / "saved", model, optimizer)


def changing(rank: int, folder: Path) -> None:
    """Batches of another size get programs that are cut where the weights are; gradients are kept where they are made,
    and what has rows comes back as a whole."""
    model = tessera.shard(model_of(rank), tessera.mesh(device="cpu", pp=2), "1f1b")
    step = tessera.train_step(model, with_logits, optimizer_of(model), executors="aten", keep_grads=True)
    first, second = token_batches(2, ROWS)
    outs = [step(*first), step(*(x[:4] for x in second))]
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    torch.save((outs, whole(model), grads), folder / f"changing_{rank}.pt")


def with_logits(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple:
    logits = model(ids)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def written(rank: int, folder: Path) -> None:
    """What one stage writes into buffers all ranks have."""
    torch.manual_seed(rank)
    model = tessera.shard(Pictures().double(), tessera.mesh(device="cpu", pp=2), "1f1b", microbatches=2)
    step = tessera.train_step(model, picture_loss, optimizer_of(model), executors="aten")
    for batch in picture_batches(2):
        step(*batch)
    torch.save(dict(model.named_buffers()), folder / f"buffers_{rank}.pt")


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that this rank has."""
    return {n: p.detach().full_tensor() for n, p in model.named_parameters() if not local_of(p).is_meta}


def told(step: object) -> dict:
    """What a rank holds and has sent along the pipeline."""
    (program,) = step.programs.values()
    state = step.state.optimizer.state
    slots = [x for slots in state.values() for x in slots.values() if x.ndim and not local_of(x).is_meta]
    return {"sent": program.channel.bytes_sent, "state": sum(local_of(x).nbytes for x in slots)}
