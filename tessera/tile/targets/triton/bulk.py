"""Tiles of matrices by the GPU's bulk copies (TMA): which accesses of a kernel can use them, and their descriptors.

A descriptor says where a matrix lies: sizes, strides, and the block that one copy moves; a program only names the
corner. That takes whole tiles over two dims, one of them contiguous, every other stride a multiple of 16 bytes, and no
mask: what lies outside of the matrix reads as zero and is not written. Dims of block one are further coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xdsl.ir import SSAValue

from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.index import Index
from tessera.tile.dialect.ops import KernelOp, LoadOp, StoreOp
from tessera.tile.dialect.types import element_of
from tessera.tile.targets.triton.layout import Dim, Layout, Run, run_name
from tessera.tile.targets.triton.spaces import Space

ALIGNED = 16  # bytes
MOST_DIMS, LONGEST = 5, 256  # of a descriptor, and of a side of its block


@dataclass(frozen=True)
class Bulk:
    """A descriptor: its coordinates from the outermost to the contiguous one."""

    buffer: SSAValue
    dims: tuple[Dim, ...]
    runs: tuple[Run, ...]
    strides: tuple[Index, ...]

    @property
    def block(self) -> tuple[int, ...]:
        return tuple(d.block for d in self.dims)

    @property
    def sides(self) -> tuple[Dim, Dim]:
        """The two dims of the tile, as they lie in memory."""
        first, second = (d for d in self.dims if d.tensor)
        return first, second

    def fits(self, values: Mapping[str, int]) -> bool:
        """Whether bulk copies take the matrix at these sizes: it has elements, and its strides are aligned."""
        item = torch_dtype(element_of(self.buffer)).itemsize
        sizes = [r.size.evaluate(values.__getitem__, int) for r in self.runs]
        strides = [s.evaluate(values.__getitem__, int) * item for s in self.strides[:-1]]
        return all(n > 0 for n in sizes) and all(n > 0 and n % ALIGNED == 0 for n in strides)

    def text(self, buffer: str, size: Callable[[Index], str]) -> str:
        """What makes the descriptor of a tensor."""
        shape, strides = ([size(e) for e in expressions] for expressions in ([r.size for r in self.runs], self.strides))
        listed = ", ".join(f"[{', '.join(map(str, part))}]" for part in (shape, strides, self.block))
        return f"TensorDescriptor({buffer}, {listed})"


def bulk_of(kernel: KernelOp, layout: Layout, op: LoadOp | StoreOp, space: Space) -> Bulk | None:
    """The descriptor through which an access can go, or None."""
    axes = frozenset(kernel.axis_names())
    expr = op.at.expr.substitute({a.axis.data: 0 for a in kernel.axes if a.size.expr.constant == 1})
    if op.indices or op.mask is not None or (isinstance(op, StoreOp) and op.mode.data != "set"):
        return None
    parts: list[tuple[Dim, Run, Index]] = []
    for dim in layout.dims:
        expr, runs = dim.rewrite(expr, axes)
        for run in runs:
            name = run_name(run.axes)
            stride = expr.stride(name)
            if stride is None or stride.names() & axes or (dim.tensor and run.axes != dim.axes):
                return None
            parts.append((dim, run, stride))
            expr = expr.substitute({name: 0})
    tile = [part for part in parts if part[0].tensor]
    inner = [part for part in tile if part[2].constant == 1]
    if expr.constant != 0 or len(inner) != 1 or {d for d, _, _ in tile} != set(space.dims) or len(parts) > MOST_DIMS:
        return None
    ordered = [*(part for part in parts if part is not inner[0]), inner[0]]
    bulk = Bulk(op.buffer, *(tuple(column) for column in zip(*ordered, strict=True)))
    return bulk if _takes(bulk) else None


def _takes(bulk: Bulk) -> bool:
    """What can be told before the sizes are known."""
    item = torch_dtype(element_of(bulk.buffer)).itemsize
    known = [s.constant * item for s in bulk.strides[:-1] if s.constant is not None]
    wide_enough = bulk.dims[-1].block * item >= ALIGNED and max(bulk.block) <= LONGEST
    return wide_enough and all(n > 0 and n % ALIGNED == 0 for n in known)
