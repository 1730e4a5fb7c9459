"""What a rank of a gloo group does that has a part of sequences, or some of the experts."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from launch import join_group
from models import GPT, MoE, token_batches, token_loss
from ranks import optimizer_of

import tessera

CASES = {"ring": ("cp", GPT), "ulysses": ("cp", GPT), "experts": ("ep", MoE)}


def model_of(word: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return CASES[word][1](1).double()


def train(rank: int, folder: str) -> None:
    """Every word in turn; rank 0 writes down losses and whole weights, both what explain says."""
    join_group(rank, 2, f"{folder}/meet")
    for word, (axis, _) in CASES.items():
        mesh, model = tessera.mesh(device="cpu", **{axis: 2}), model_of(word)
        step = tessera.train_step(model, token_loss, optimizer_of(model), executors="aten", mesh=mesh, plan=word)
        own = slice(2 * rank, 2 * rank + 2) if word == "experts" else slice(None)
        losses = [float(step(*(x[own] for x in batch))) for batch in token_batches(2)]
        weights = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
        Path(folder, f"{word}_{rank}.txt").write_text(str(tessera.explain(step)))
        if rank == 0:
            torch.save((losses, weights), Path(folder) / f"{word}.pt")
    dist.destroy_process_group()
