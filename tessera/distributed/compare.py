"""Ranks compare what they have, as plain data; a group that is not there is not asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from tessera.util.errors import MeshError


def everyones(mine: object, group: dist.ProcessGroup | None = None) -> list:
    """What each rank has; only this rank's own where no other is there."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return [mine]
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine, group=group)
    return every


def on_all(what: str, step: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Run a step on every rank and wait for all of them. Where it fails on one, it fails on all, which say on whom."""
    failure: Exception | None = None
    try:
        step()
    except Exception as error:
        failure = error
    every = everyones(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    for rank, told in enumerate(every):
        if told is not None:
            raise MeshError(f"{what}: rank {rank} failed: {told}")


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
