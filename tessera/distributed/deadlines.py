"""One deadline for all groups of ranks: the one of the process group that everything began with."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tessera.torch_internals.distributed import deadline_of, default_store, set_deadline


def deadline() -> timedelta:
    """Seconds after which a rank that waits for others gives up."""
    return deadline_of(dist.group.WORLD, torch.device("cpu" if dist.get_backend() == "gloo" else "cuda"))


def share_deadline(device_mesh: DeviceMesh | None, seconds: float | None = None) -> None:
    """The groups along the axes, if there are any yet, give up when the first group does, or after so many seconds."""
    if dist.get_backend() == "fake":
        return
    limit = deadline() if seconds is None else timedelta(seconds=seconds)
    if seconds is not None:
        set_deadline(limit)
        default_store().set_timeout(limit)  # new groups meet there
    for axis in range(device_mesh.ndim if device_mesh is not None else 0):
        set_deadline(limit, device_mesh.get_group(axis))  # type: ignore[union-attr]
