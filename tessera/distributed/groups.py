"""`mesh`: the ranks that torchrun started, as a grid with named axes.

In: sizes by name. Out: PyTorch's DeviceMesh, over the process group that is there, the one that torchrun's environment
describes, or a fake one whose other ranks do not exist.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tessera.distributed.communicator import bind
from tessera.ir.mesh import Mesh
from tessera.util.errors import InputError


def mesh(*, device: str | None = None, fake: bool = False, timeout: float | None = None, **axes: int) -> DeviceMesh:
    """A mesh of ranks, such as `tessera.mesh(dp=4, tp=2)`; the last axis holds neighbours.

    device   "cuda" or "cpu"; None: CUDA where there is one
    timeout  seconds after which a rank that waits for others stops, in a group that is made here; None: PyTorch's
    fake     without a process group: be rank 0 of ranks that are not there, to look at programs and measure one rank
    """
    wanted = Mesh.of(axes)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _join(wanted, kind, fake, timeout)
    if dist.get_world_size() != wanted.ranks:
        raise InputError(
            f"mesh: {wanted} has {wanted.ranks} ranks, the process group {dist.get_world_size()}; "
            f"start the program with torchrun --nproc-per-node={wanted.ranks}, or choose other sizes"
        )
    made = init_device_mesh(kind, tuple(wanted.sizes.values()), mesh_dim_names=wanted.names)
    bind(made)
    return made


def _join(wanted: Mesh, kind: str, fake: bool, timeout: float | None) -> None:
    if dist.is_initialized():
        return
    if fake:
        from tessera.torch_internals.fake_group import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=wanted.ranks)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        limit = None if timeout is None else timedelta(seconds=timeout)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=limit)
    else:
        raise InputError(
            f"mesh: there is no process group for {wanted}; start the program with "
            f"torchrun --nproc-per-node={wanted.ranks} …, or say mesh(…, fake=True) to be one rank alone"
        )
