"""Ranks compare what they have, as plain data; a group that is not there is not asked."""

from __future__ import annotations

import itertools

import torch.distributed as dist
from torch import nn

from tessera.util.errors import MeshError


def everyones(mine: object) -> list:
    """What each rank has; only this rank's own where no other is there."""
    if dist.get_backend() == "fake":
        return [mine]
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def first_difference(every: list[list], what: str) -> None:
    """Raise where a rank's list is not rank 0's, with the first entries that differ."""
    for rank, other in enumerate(every):
        for a, b in itertools.zip_longest(every[0], other, fillvalue="nothing more"):
            if a != b:
                raise MeshError(f"rank {rank} has another {what} than rank 0: it has {b!r}, rank 0 {a!r}")


def agree_on_weights(model: nn.Module) -> None:
    """All ranks have weights of the same names, sizes and dtypes."""
    named = (*model.named_parameters(), *model.named_buffers())
    first_difference(everyones([f"{name}: {x.dtype} {list(x.shape)}" for name, x in named]), "model")
