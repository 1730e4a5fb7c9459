"""A rank's own number, inside a function of parts.

PyTorch gives it as a Python number, which would be that of the rank that traces, while one program serves all ranks. So
while such a function is traced, `dist.get_rank` and `DeviceMesh.get_local_rank` give a tensor that differs between
ranks. Arithmetic takes it as it takes a number; a Python `if` on it is refused by its line, as on any tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tessera.ir.mesh import Mesh


@contextmanager
def own_rank(places: Mapping[str, Tensor], mesh: Mesh, axes_of: Callable) -> Iterator[None]:
    """`places` is where a rank stands along each axis."""
    thread, get_rank, get_local_rank = threading.get_ident(), dist.get_rank, DeviceMesh.get_local_rank

    def rank_in(group: object = None) -> object:
        here = threading.get_ident() == thread
        axes = axes_of(group or dist.group.WORLD) if here else None
        if not axes:
            return get_rank(group)  # type: ignore[arg-type]
        rank = places[axes[0]]
        for axis in axes[1:]:
            rank = rank * mesh.size(axis) + places[axis]
        return rank

    def place_in(self: DeviceMesh, mesh_dim: int | str | None = None) -> object:
        names = self.mesh_dim_names or ()
        one = 0 if mesh_dim is None and self.ndim == 1 else mesh_dim
        name = names[one] if isinstance(one, int) and names else one
        mine = places.get(name) if isinstance(name, str) and threading.get_ident() == thread else None
        return get_local_rank(self, mesh_dim) if mine is None else mine

    dist.get_rank, DeviceMesh.get_local_rank = rank_in, place_in  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.get_rank, DeviceMesh.get_local_rank = get_rank, get_local_rank  # type: ignore[method-assign]
