"""What the proposals of schedules ask about a kernel at given sizes, and words that they share."""

from __future__ import annotations

import math

from xdsl.dialects.builtin import Float32Type
from xdsl.ir import Operation

from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.ops import PARALLEL, ContractOp, KernelOp, LoadOp, ReduceExpOp, ScanOp, StoreOp
from tessera.tile.dialect.types import axes_of, element_of
from tessera.tile.rewrites.online import with_reduce_exp
from tessera.tile.rewrites.split_reduction import can_split, ends_all
from tessera.tile.schedules.cost import axis_sizes
from tessera.tile.schedules.limits import Limits
from tessera.tile.schedules.schedule import plan, reduced_axis
from tessera.util.powers import power_of_two

SECTOR = 32  # bytes that memory gives at once


class Shape:
    """What the proposals ask about a kernel at given sizes, for a machine of these limits."""

    def __init__(self, kernel: KernelOp, sizes: dict[str, int], limits: Limits) -> None:
        self.kernel, self.limits = kernel, limits
        self.sizes = axis_sizes(kernel, sizes)
        self.axis = reduced_axis(kernel)
        self.parallel = kernel.axis_names(PARALLEL)
        self.points = math.prod(self.sizes[a] for a in self.parallel)
        self.fast, self.item = self._fast()
        looped = with_reduce_exp(kernel)
        self.loops = sum(step.axis is not None for step in plan(looped))
        self.exponentials = any(isinstance(op, ReduceExpOp) for op in looped.block.ops)
        self.held, self.again = self._between_loops()
        self.splits = can_split(kernel)
        self.ends = ends_all(kernel)
        self.scans = any(isinstance(op, ScanOp) for op in kernel.block.ops)
        self.dynamic = bool(kernel.symbol_names)  # other sizes will come: nothing is made small for these

    def _fast(self) -> tuple[dict[str, int], int]:
        """Bytes that are contiguous along each axis, in runs at least, and the size of the narrowest element that
        matters."""
        weights: dict[str, int] = {}
        items: dict[int, int] = {}
        for op in self.kernel.block.ops:
            if not isinstance(op, (LoadOp, StoreOp)):
                continue
            expr = op.at.expr
            item = torch_dtype(element_of(op.buffer)).itemsize
            moved = item * math.prod(self.sizes[a] for a in expr.names() & set(self.sizes))
            items[item] = items.get(item, 0) + moved
            for a, size in self.sizes.items():
                if size > 1 and (run := expr.run(a, size)) > 1 and (run == size or run * item >= SECTOR):
                    weights[a] = weights.get(a, 0) + moved
        heavy = max(items.values(), default=1)
        item = min((n for n, moved in items.items() if moved * 8 >= heavy), default=4)
        top = max(weights.values(), default=0)
        return {a: w for a, w in weights.items() if w * 8 >= top}, item

    def _between_loops(self) -> tuple[int, int]:
        """Bytes, of one element along the reduced axis, that are held from one loop to the next if rows are whole in
        registers, where arithmetic is in f32; and that loops read again otherwise, each row its own."""
        loops = [set(step.ops) for step in plan(with_reduce_exp(self.kernel)) if step.axis is not None]
        held: set[Operation] = set()
        before: set[Operation] = set()
        for ops in loops:
            new = ops - before
            held |= {op for op in ops & before if any(use.operation in new for use in op.results[0].uses)}
            before |= ops
        rows = set(self.parallel)
        loads = [op for op in before if isinstance(op, LoadOp) and op.at.expr.names() & rows]
        again = [op for op in loads if sum(op in ops for ops in loops) > 1]
        return 4 * len(held), sum(torch_dtype(element_of(op.buffer)).itemsize for op in again)

    def has_row_values(self, fast: str) -> bool:
        """Whether there are long rows with values of their own: one load a program then, not one an element."""
        axes = set(self.parallel)
        loads = [op.at.expr.names() & axes for op in self.kernel.block.ops if isinstance(op, LoadOp)]
        return self.sizes[fast] >= 2048 and any(used and fast not in used for used in loads)

    def product_sides(self) -> tuple[str, str, bool] | None:
        """The blocks' keys of a matrix product's rows and columns, and whether its operands are f32."""
        contracts = [op for op in self.kernel.block.ops if isinstance(op, ContractOp)]
        if not contracts:
            return None
        lhs, rhs = set(axes_of(contracts[0].lhs)), set(axes_of(contracts[0].rhs))
        keys = [self._neighbours(only) for only in (lhs - rhs, rhs - lhs)]
        if None in keys or any(math.prod(self.sizes[a] for a in k.split()) < 2 for k in keys if k):
            return None
        rows, columns = sorted((k for k in keys if k), key=lambda k: self.parallel.index(k.split()[0]))
        loaded = [v.owner for v in (contracts[0].lhs, contracts[0].rhs)]
        wide = any(isinstance(op, LoadOp) and isinstance(element_of(op.result), Float32Type) for op in loaded)
        return rows, columns, wide

    def _neighbours(self, axes: set[str]) -> str | None:
        """Axes as one key of a block, if they are parallel and stand side by side; the last of them otherwise."""
        own = [a for a in self.parallel if a in axes and self.sizes[a] > 1]
        if not own:
            return None
        text, every = " ".join(own), " ".join(self.parallel)
        return text if f" {text} " in f" {every} " else own[-1]

    def tile_loads(self, axis: str, key: str) -> int:
        """Loads that vary along both."""
        loads = [op for op in self.kernel.block.ops if isinstance(op, LoadOp)]
        return sum(axis in (names := op.at.expr.names()) and bool(names & set(key.split())) for op in loads)

    def tile_stores(self, axis: str, key: str) -> bool:
        stores = [op for op in self.kernel.block.ops if isinstance(op, StoreOp)]
        return any(axis in (names := op.at.expr.names()) and bool(names & set(key.split())) for op in stores)

    def size(self, key: str) -> int:
        return math.prod(self.sizes[a] for a in key.split())

    @property
    def across(self) -> str | None:
        """A parallel axis along which some large tensor is contiguous, where others are along the reduced one."""
        others = [a for a in self.fast if a != self.axis and self.sizes[a] >= self.sector]
        return max(others, key=self.fast.__getitem__) if others and self.axis in self.fast else None

    @property
    def sector(self) -> int:
        """Elements that memory gives at once."""
        return max(SECTOR // self.item, 1)

    @property
    def vector(self) -> int:
        """Elements of one access of 16 bytes."""
        return max(16 // self.item, 1)


def blocks_of(key: str, rows: int, axis: str, block: int) -> tuple[tuple[str, int], ...]:
    return ((key, rows), (axis, block)) if key else ((axis, block),)


def warps_for(elements: int, each: int) -> int:
    """Warps that leave every thread `each` elements."""
    return min(max(power_of_two(elements // (32 * each)), 1), 32)
