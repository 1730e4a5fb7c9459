"""Which buffers a kernel may write over buffers that it reads.

In: a kernel. Out: for each buffer that it writes, the buffers that it reads (both by position) such that the kernel
computes the same if the two are one memory. That is so where every element of the read buffer is looked at by the one
program that afterwards writes it, at the same place: loads and the store have the same offset, the offset tells all
parallel axes apart and does not vary along a reduced one, and every load stands before the store. Where something is
stored along a reduced axis, nothing is written over: a schedule may share that axis among programs, all of which read
what belongs to the whole row.
"""

from __future__ import annotations

from tessera.tile.dialect.ops import PARALLEL, REDUCE, KernelOp, LoadOp, StoreOp
from tessera.tile.dialect.types import element_of


def overwrites(kernel: KernelOp) -> dict[int, tuple[int, ...]]:
    buffers = kernel.buffers
    loads: dict[int, list[tuple[int, LoadOp]]] = {}
    stores: dict[int, list[tuple[int, StoreOp]]] = {}
    for place, op in enumerate(kernel.block.ops):
        if isinstance(op, LoadOp):
            loads.setdefault(buffers.index(op.buffer), []).append((place, op))
        elif isinstance(op, StoreOp):
            stores.setdefault(buffers.index(op.buffer), []).append((place, op))
    reduced = set(kernel.axis_names(REDUCE))
    if any(reduced & store.at.expr.names() for into in stores.values() for _, store in into):
        return dict.fromkeys(stores, ())
    inputs = {}
    for written, into in stores.items():
        inputs[written] = tuple(
            read
            for read, seen in loads.items()
            if written not in loads and read not in stores and _same_place(kernel, into, seen)
            if element_of(buffers[written]) == element_of(buffers[read])
        )
    return inputs


def _same_place(kernel: KernelOp, into: list[tuple[int, StoreOp]], seen: list[tuple[int, LoadOp]]) -> bool:
    if len(into) != 1:
        return False
    place, store = into[0]
    names = store.at.expr.names()
    plain = store.mode.data == "set" and not store.indices and store.mask is None
    all_axes = set(kernel.axis_names(PARALLEL)) <= names and not set(kernel.axis_names(REDUCE)) & names
    return (
        plain
        and all_axes
        and all(before < place and load.at.expr == store.at.expr and not load.indices for before, load in seen)
    )
