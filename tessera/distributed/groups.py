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
from tessera.distributed.compare import everyones, first_difference
from tessera.distributed.deadlines import share_deadline
from tessera.distributed.users_line import at_users_line
from tessera.ir.mesh import Mesh
from tessera.util.errors import InputError, OptionError

STARTING = 300.0  # seconds by which some ranks may start later than others, however short the deadline is
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what it tells each rank


@at_users_line
def mesh(*, device: str | None = None, fake: bool = False, timeout: float | None = None, **axes: int) -> DeviceMesh:
    """A mesh of ranks, such as `tessera.mesh(dp=4, tp=2)`; the last axis holds neighbours.

    device   "cuda" or "cpu"; None: CUDA where there is one
    timeout  seconds after which a rank that waits for others stops, once all have started; None: those of the process
             group, or PyTorch's
    fake     without a process group: be rank 0 of ranks that are not there, to look at programs and measure one rank
    """
    if not axes:
        raise OptionError("mesh: expected axes and how many ranks each has, such as dp=4, tp=2, got none")
    if timeout is not None and not timeout > 0:
        raise OptionError(f"mesh: expected a timeout of some seconds, or None, got {timeout!r}")
    wanted = Mesh.of(axes)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _join(wanted, kind, fake, timeout)
    if dist.get_world_size() != wanted.ranks:
        raise InputError(
            f"mesh: {wanted} has {wanted.ranks} ranks, the process group {dist.get_world_size()}; "
            f"start the program with torchrun --nproc-per-node={wanted.ranks}, or choose other sizes"
        )
    share_deadline(None, timeout)
    first_difference(everyones([str(wanted)]), "mesh")
    device_mesh = init_device_mesh(kind, tuple(wanted.sizes.values()), mesh_dim_names=wanted.names)
    share_deadline(device_mesh, timeout)
    bind(device_mesh)
    return device_mesh


def _join(wanted: Mesh, kind: str, fake: bool, timeout: float | None) -> None:
    if dist.is_initialized():
        return
    if fake:
        from tessera.torch_internals.fake_group import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=wanted.ranks)
    elif not (missing := [name for name in TORCHRUN if name not in os.environ]):
        limit = None if timeout is None else timedelta(seconds=max(timeout, STARTING))
        backend, store = "nccl" if kind == "cuda" else "gloo", _store_of_torchrun()
        if store is None:
            dist.init_process_group(backend, timeout=limit)
        else:
            rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=ranks)  # type: ignore[arg-type]
    else:
        raise InputError(
            f"mesh: there is no process group for {wanted}, and the environment has no {', '.join(missing)}; start the "
            f"program with torchrun --nproc-per-node={wanted.ranks} …, or say mesh(…, fake=True) to be one rank alone"
        )


def _store_of_torchrun() -> object | None:
    """The store that torchrun keeps for its ranks, where it does. It outlives them, so that ranks that are started
    again would find the addresses of those that are gone: every attempt has names of its own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, int(os.environ["WORLD_SIZE"]), is_master=False)  # type: ignore[attr-defined]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
