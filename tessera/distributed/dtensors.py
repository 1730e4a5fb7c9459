"""Placements as DTensor says them, both ways.

DTensor has one word for each axis of the mesh: replicated, split along a dimension, or a part of a sum. Where several
axes split one dimension, earlier axes are the outer ones; an earlier axis that splits what a later one left is a
"strided" shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.types import contiguous_strides
from tessera.torch_internals.distributed import StridedShard
from tessera.util.errors import InputError


def to_dtensor(placement: Placement) -> list:
    """A word for each axis of the mesh."""
    if placement.marks:
        raise InputError(f"expected a placement whose axes cut plainly, got {placement}")
    words: list = []
    names = placement.mesh.names
    for axis in names:
        how, dim = placement.how(axis), placement.dim_of(axis)
        if how is not None:
            words.append(Partial(how))
        elif dim is None:
            words.append(Replicate())
        else:
            axes = placement.splits[dim]
            outer = axes[: axes.index(axis)]
            late = prod(placement.mesh.size(a) for a in outer if names.index(a) > names.index(axis))
            words.append(Shard(dim) if late == 1 else StridedShard(dim, split_factor=late))
    return words


def from_dtensor(words: Sequence, mesh: Mesh, shape: Sequence[int]) -> Placement:
    splits: list[list[str]] = [[] for _ in shape]
    parts = []
    for axis, word in zip(mesh.names, words, strict=True):
        if isinstance(word, Partial):
            if word.reduce_op not in ("sum", "max", "min"):
                raise InputError(f"expected parts that are summed, or the largest or smallest, got {word}")
            parts.append((axis, word.reduce_op))
        elif isinstance(word, (Shard, StridedShard)):
            splits[word.dim].append(axis)
    for dim, axes in enumerate(splits):
        splits[dim] = _ordered(axes, words, mesh, dim)
    return Placement(mesh, tuple(shape), tuple(map(tuple, splits)), tuple(parts))


def _ordered(axes: list[str], words: Sequence, mesh: Mesh, dim: int) -> list[str]:
    """Later axes first where a strided shard says that they are the outer ones."""
    order: list[str] = []
    for axis in reversed(axes):
        factor = getattr(words[mesh.names.index(axis)], "split_factor", 1)
        at = next((i for i in range(len(order) + 1) if prod(mesh.size(a) for a in order[:i]) == factor), None)
        if at is None:
            raise InputError(f"dimension {dim}: no axis of the mesh {mesh} explains a shard with a stride of {factor}")
        order.insert(at, axis)
    return order


def as_dtensor(local: Tensor, placement: Placement, device_mesh: DeviceMesh) -> DTensor:
    """This rank's part as a DTensor."""
    shape = torch.Size(int(n) for n in placement.shape)
    stride = tuple(int(n) for n in contiguous_strides(shape))
    words = to_dtensor(placement)
    return DTensor.from_local(local, device_mesh, words, run_check=False, shape=shape, stride=stride)
