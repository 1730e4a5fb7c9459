"""Boxes: which part of a whole tensor a rank holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tessera.distributed.communicator import bind
from tessera.distributed.weights import local_of, placement_of
from tessera.ir.dist import first_place
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
    placement, mesh = placement_of(x, bind(x.device_mesh)), x.device_mesh
    if placement.parts:
        raise InputError(f"expected a tensor that holds no summands, got {placement}")
    places = {axis: mesh.get_local_rank(axis) for axis in placement.mesh.names}
    pairs = [first_place(placement.mesh, places, n, axes) for n, axes in zip(x.shape, placement.splits, strict=True)]
    return Box(tuple(at for at, _ in pairs), tuple(there for _, there in pairs))


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
    placement = placement_of(x, bind(x.device_mesh))
    if local_of(x).is_meta:
        return False
    free = [axis for axis in placement.mesh.names if axis not in placement.axes and axis != apart]
    return all(x.device_mesh.get_local_rank(axis) == 0 for axis in free)
