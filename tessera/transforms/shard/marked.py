"""Collectives along dimensions that an axis does not cut plainly (`ir/placement`).

In: a value on one rank and a step from one placement to another. Out: the same collective between equations that move
elements: a dimension made of several is taken apart first, and chunks come in the order of ranks before they are cut,
and in their own order after they are joined.
"""

from __future__ import annotations

from math import prod

from tessera.ir.builder import aten, emit
from tessera.ir.dist import Collective
from tessera.ir.equation import Value
from tessera.ir.placement import PLAIN, Placement
from tessera.transforms.shard.paths import Step


def is_marked(step: Step) -> bool:
    return step.before.mark(step.axis) != PLAIN or step.after.mark(step.axis) != PLAIN


def exchanged(x: Value, op: Collective, step: Step) -> Value:
    """Emit a step in which a marked axis enters or leaves a dimension."""
    leaves, enters = step.before.dim_of(step.axis), step.after.dim_of(step.axis)
    blocks = {}
    for dim, place in ((leaves, step.before), (enters, step.after)):
        if dim is not None and (count := _blocks(place, step.axis, dim)) > 1:
            blocks[dim] = count
    at = {dim: dim + sum(d <= dim for d in blocks) for dim in range(len(step.after.shape))}
    x = aten.reshape(x, _taken_apart(x.shape, blocks)) if blocks else x
    ranks = step.after.mesh.size(step.axis)
    if enters is not None and step.after.mark(step.axis).zigzag:
        x = in_order_of_ranks(x, at[enters], ranks)
    dims = step.args.index(step.axis)  # behind the axis stands a size
    x = emit(op, x, *(at[d] for d in step.args[:dims]), *step.args[dims:])
    if leaves is not None and step.before.mark(step.axis).zigzag:
        x = in_own_order(x, at[leaves], ranks)
    return aten.reshape(x, list(step.after.local_shape)) if blocks else x


def _blocks(place: Placement, axis: str, dim: int) -> int:
    """The blocks of a dimension that a rank has: others may be cut away."""
    blocks = place.mark(axis).blocks
    return blocks // prod(place.mesh.size(a) for a, mark in place.entries(dim) if mark.blocks < blocks)


def _taken_apart(shape: tuple, blocks: dict[int, int]) -> list:
    sizes = []
    for dim, size in enumerate(shape):
        sizes += [blocks[dim], size // blocks[dim]] if dim in blocks else [size]
    return sizes


def in_order_of_ranks(x: Value, dim: int, ranks: int) -> Value:
    """Chunks 0, 1, … 2n-1 of a dimension as 0, 2n-1, 1, 2n-2, …"""
    shape = list(x.shape)
    halves = aten.reshape(x, [*shape[:dim], 2, ranks, shape[dim] // (2 * ranks), *shape[dim + 1 :]])
    first, last = aten.select(halves, dim, 0), aten.flip(aten.select(halves, dim, 1), [dim])
    return aten.reshape(aten.stack([first, last], dim + 1), shape)


def in_own_order(x: Value, dim: int, ranks: int) -> Value:
    """What `in_order_of_ranks` did, undone."""
    shape = list(x.shape)
    pairs = aten.reshape(x, [*shape[:dim], ranks, 2, shape[dim] // (2 * ranks), *shape[dim + 1 :]])
    first, last = aten.select(pairs, dim + 1, 0), aten.flip(aten.select(pairs, dim + 1, 1), [dim])
    return aten.reshape(aten.stack([first, last], dim), shape)
