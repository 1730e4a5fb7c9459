"""Collectives over process groups: what the equations of a program call on one rank.

In: a mesh of PyTorch's. Out: a `Communicator` bound to the mesh of that form, so that programs for it run. NCCL, gloo
and the fake backend serve alike: everything goes along the first dimension. What was begun is remembered by its result
until that is waited for.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tessera.distributed import watch
from tessera.distributed.carried import Carrier
from tessera.distributed.deadlines import share_deadline
from tessera.ir.dist import axis_in, on, padded, put_together
from tessera.ir.mesh import Mesh
from tessera.util.errors import InputError, MeshError

JOINED_AT = {"all_gather": 0, "all_to_all": 1}  # which argument says along what chunks are joined
LOADS = 1000  # exchanges of rows that are remembered


class GroupCommunicator:
    """This rank's end of the groups along each axis."""

    def __init__(self, mesh: Mesh, device_mesh: DeviceMesh) -> None:
        self.places = {axis: device_mesh.get_local_rank(axis) for axis in mesh.names}
        self.groups = {axis: Carrier(device_mesh.get_group(axis)) for axis in mesh.names}
        self.under_way: dict[int, Any] = {}  # by the number of a result, what waits for it
        self.mesh, self.sizes = mesh, mesh.sizes
        self.rank, self.peers = device_mesh.get_rank(), {axis: _peers(device_mesh, axis) for axis in mesh.names}
        self.fake = dist.get_backend(device_mesh.get_group(mesh.names[0])) == "fake"
        self.loads: list[tuple[str, int, int]] = []
        self._begin = {
            "all_gather": self.all_gather, "reduce_scatter": self.reduce_scatter, "all_reduce": self.all_reduce,
            "all_to_all": self.all_to_all, "permute": self.permute, "rows": self.rows,
        }  # fmt: skip

    def exchange(self, name: str, x: Tensor, *args: Any) -> Tensor:
        return self.wait(self.begin(x, name, *args), x, name, *args)

    def begin(self, x: Tensor, name: str, *args: Any) -> Tensor:
        """What comes in; it may not be read yet."""
        try:
            return self._begin[name](x, *args)
        except (torch.OutOfMemoryError, InputError):  # RuntimeErrors, and this rank's own
            raise
        except RuntimeError as error:
            raise self.in_vain(x, name, args, error) from error

    def wait(self, y: Tensor, x: Tensor, name: str, *args: Any) -> Tensor:
        work = self.under_way.pop(id(y), None)
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.in_vain(x, name, args, error) from error
        at = JOINED_AT.get(name)
        if at is None or (args[at] == 0 and len(args) == at + 2):  # the dimension, its axis, and no size
            return y  # as most are
        return put_together(self.mesh, y, name, *args)

    def in_vain(self, x: Tensor, name: str, args: tuple, error: RuntimeError) -> MeshError:
        """Which exchange did not end, and who is missing."""
        axis, here = axis_in(args), watch.position(sys._getframe())
        peers = self.peers[axis]
        return MeshError(
            f"rank {self.rank}: dist.{name} of {tuple(x.shape)} along {axis} did not end; it waits for the ranks "
            f"{peers} of the mesh {self.mesh}, at `{here}`: {watch.absent(here, peers)} ({error})"
        )

    def all_gather(self, x: Tensor, dim: int, axis: str, size: int | None = None) -> Tensor:
        x = x.contiguous()
        shape = [*x.shape]
        shape[0] *= self.sizes[axis]
        out = x.new_empty_strided(shape, x.stride())  # the quickest way to get one
        self.under_way[id(out)] = self.groups[axis].all_gather(out, x)
        return out

    def reduce_scatter(self, x: Tensor, dim: int, axis: str) -> Tensor:
        ranks, shape = self.sizes[axis], [*x.shape]
        if dim == 0 and not shape[0] % ranks:
            given = x.contiguous()
        else:
            given = _stacked(x, dim, ranks)
            shape = [*given.shape]
        shape[0] //= ranks
        out = given.new_empty_strided(shape, given.stride())
        self.under_way[id(out)] = self.groups[axis].reduce_scatter(out, given)
        return out

    def all_reduce(self, x: Tensor, axis: str, how: str = "sum", over: str | None = None) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format) if over is None else x
        self.under_way[id(out)] = self.groups[axis].all_reduce(out, how)
        return out

    def all_to_all(self, x: Tensor, split: int, join: int, axis: str, size: int | None = None) -> Tensor:
        given = _stacked(x, split, self.sizes[axis])
        out = torch.empty_like(given)
        self.under_way[id(out)] = self.groups[axis].all_to_all(out, given, [], [])
        return out

    def permute(self, x: Tensor, axis: str, by: int = 1) -> Tensor:
        given, shape = x.contiguous(), x.shape
        out = torch.empty_like(given)
        take, give = _route(self.sizes[axis], self.places[axis], by, shape[0] if shape else 1)
        flat = (out, given) if shape else (out.view(1), given.view(1))
        self.under_way[id(out)] = self.groups[axis].all_to_all(*flat, take, give)
        return out

    def rows(self, x: Tensor, give: Tensor, take: Tensor, axis: str, size: int, back: str | None = None) -> Tensor:
        if self.fake:  # nobody told how many rows come
            sent = came = [min(x.shape[0], size) // self.sizes[axis]] * self.sizes[axis]
        else:
            sent, came = give.tolist(), take.tolist()
        if back is None:
            self.loads = [*self.loads[1 - LOADS :], (axis, sum(sent), sum(came))]
        out, count = x.new_empty((size, *x.shape[1:])), sum(came)
        out[count:].zero_()
        given = x[: sum(sent)].contiguous()
        self.under_way[id(out)] = self.groups[axis].all_to_all(out[:count], given, came, sent)
        return out


@functools.lru_cache(1024)
def _route(ranks: int, place: int, by: int, rows: int) -> tuple[list[int], list[int]]:
    """How many rows come from each rank, and go to each, where each rank sends to the one `by` places behind it."""
    take, give = [0] * ranks, [0] * ranks
    take[(place - by) % ranks] = give[(place + by) % ranks] = rows
    return take, give


def _peers(device_mesh: DeviceMesh, axis: str) -> list[int]:
    """The ranks along an axis through this one."""
    return dist.get_process_group_ranks(device_mesh.get_group(axis))


def _stacked(x: Tensor, dim: int, ranks: int) -> Tensor:
    """Chunks along a dimension, one after the other along the first."""
    if dim == 0 and not x.shape[0] % ranks:
        return x.contiguous()
    x = padded(x, dim, ranks)
    return (x if dim == 0 else torch.cat(x.chunk(ranks, dim), 0)).contiguous()  # cat keeps images' order


def bind_inner(inner: Mesh, device_mesh: DeviceMesh) -> None:
    """Programs of one stage of a pipeline, which are written for a part of a mesh, run over its groups."""
    on(inner).communicator = GroupCommunicator(inner, device_mesh)


def bind(device_mesh: DeviceMesh) -> Mesh:
    """The mesh that programs are written for; from now on they run over these groups."""
    names = device_mesh.mesh_dim_names
    if not names:
        raise InputError("expected a DeviceMesh whose axes have names, such as mesh_dim_names=('dp', 'tp')")
    mesh = Mesh(tuple(zip(names, device_mesh.shape, strict=True)))
    on(mesh).communicator = GroupCommunicator(mesh, device_mesh)
    share_deadline(device_mesh)
    watch.start()
    return mesh
