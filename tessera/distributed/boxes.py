"""Boxes: which part of a whole tensor a rank holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tessera.distributed.weights import local_of, placement_of
from tessera.ir.dist import first_place
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.util.errors import InputError


@dataclass(frozen=True)
class Box:
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.size

    def of(self, x: Tensor, outer: Box) -> Tensor:
        """This box's part of a tensor that holds the outer one."""
        for dim, (at, size) in enumerate(zip(self.start, self.size, strict=True)):
            x = x.narrow(dim, at - outer.start[dim], size)
        return x


def overlap(a: Box, b: Box) -> Box | None:
    """What is in both."""
    start = tuple(map(max, a.start, b.start))
    size = tuple(min(i + n, j + m) - at for i, n, j, m, at in zip(a.start, a.size, b.start, b.size, start, strict=True))
    return Box(start, size) if all(n > 0 for n in size) else None


def box_of(x: Tensor) -> Box:
    """What this rank holds of a tensor."""
    if not isinstance(x, DTensor):
        return Box((0,) * x.ndim, tuple(x.shape))
    placement, places = _placed(x)
    if placement.parts:
        raise InputError(f"expected a tensor that holds no summands, got {placement}")
    if places is None:
        return Box((0,) * x.ndim, (0,) * x.ndim)
    pairs = [first_place(placement.mesh, places, n, axes) for n, axes in zip(x.shape, placement.splits, strict=True)]
    return Box(tuple(at for at, _ in pairs), tuple(there for _, there in pairs))


def _placed(x: DTensor) -> tuple[Placement, dict[str, int] | None]:
    """Where a tensor lies, and this rank's place on that mesh, if it stands there; axes need no names."""
    names = x.device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(x.device_mesh.ndim))
    mesh = Mesh(tuple(zip(names, x.device_mesh.shape, strict=True)))
    here = x.device_mesh.get_coordinate()
    return placement_of(x, mesh), None if here is None else dict(zip(names, here, strict=True))


def own(x: Tensor, box: Box) -> Tensor:
    """A rank's part without what pads it."""
    part = local_of(x)
    for dim, size in enumerate(box.size):
        part = part.narrow(dim, 0, size)
    return part


def writes(x: Tensor, apart: str | None = None) -> bool:
    """Of the ranks that hold the same part, the first one writes it. Ranks along `apart`, the axis of a pipeline, hold
    different weights: whoever has one writes it."""
    if not isinstance(x, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    placement, places = _placed(x)
    if places is None or local_of(x).is_meta:
        return False
    free = [axis for axis in placement.mesh.names if axis not in placement.axes and axis != apart]
    return all(places[axis] == 0 for axis in free)
