"""A kernel that works row by row and sums over the rows as well, where rows are too long to carry their sums, in two.

    before:  y[i, r] = f(x[i, r], s[i]), where s[i] = sum over r of x[i, r];  z[r] = g(sum over i of x[i, r])
    -->
    first:   s[i] to scratch memory
    second:  y[i, r] = f(x[i, r], scratch[i]);  z[r] = g(sum over i of x[i, r]), for some columns a program

Rows are read twice, but both kernels stream, and neither holds more than a small block. The second is an ordinary sum
over columns, which many programs may share (`split_reduction`). It begins with the last row: the rows that the first
kernel read last are still in the cache.
"""

from __future__ import annotations

from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect.build import KernelBuilder
from tessera.tile.dialect.index import Index, name
from tessera.tile.dialect.ops import KernelOp, LoadOp, ReduceOp, ScanOp, StoreOp
from tessera.tile.dialect.types import axes_of, element_of
from tessera.tile.rewrites.copying import Copy, needed_for, place, points
from tessera.tile.rewrites.offline import without_reduce_exp
from tessera.tile.rewrites.split_kernel import Scratch, Split
from tessera.tile.schedules.schedule import after_sums, reduced_axis


def can_split_rows(kernel: KernelOp) -> bool:
    """Whether nothing runs along a row but reductions, and nothing is read that is written."""
    if kernel.sequential_axis is None or any(isinstance(op, ScanOp) for op in kernel.block.ops):
        return False
    loaded, stored = ({op.buffer for op in kernel.block.ops if isinstance(op, kind)} for kind in (LoadOp, StoreOp))
    return not loaded & stored


def split_rows(kernel: KernelOp) -> Split:
    kernel = without_reduce_exp(kernel)
    assert can_split_rows(kernel), f"{kernel.sym_name.data} cannot be split into rows and columns"
    rows = _of_rows(kernel)
    kept = [op for op in kernel.block.ops if op in rows and _leaves(op, rows)]
    scratch = [Scratch(element_of(op.results[0]), points(kernel, axes_of(op.results[0]))) for op in kept]
    stores = [op for op in kernel.block.ops if isinstance(op, StoreOp)]
    return Split(
        _first(kernel, kept, [op for op in stores if op in rows]),
        _second(kernel, kept, [op for op in stores if op not in rows]),
        scratch,
    )


def _of_rows(kernel: KernelOp) -> set[Operation]:
    """Reductions along rows, and what is made of them row by row."""
    axis, later = reduced_axis(kernel), set(after_sums(kernel))
    ops: set[Operation] = set()
    for op in kernel.block.ops:
        reduces = isinstance(op, ReduceOp) and op.axis.data == axis
        follows = any(v.owner in ops for v in op.operands) and not _along(op, axis) and op not in later
        if reduces or (follows and not isinstance(op, ReduceOp)):
            ops.add(op)
    return ops


def _along(op: Operation, axis: str | None) -> bool:
    if isinstance(op, StoreOp):
        return axis in op.at.expr.names() or any(axis in axes_of(v) for v in (op.value, *op.indices))
    return any(axis in axes_of(r) for r in op.results)


def _leaves(op: Operation, rows: set[Operation]) -> bool:
    return any(use.operation not in rows for r in op.results for use in r.uses)


def _first(kernel: KernelOp, kept: list[Operation], stores: list[Operation]) -> KernelOp:
    k = _builder(kernel, "rows")
    sequential = kernel.sequential_axis
    for a in kernel.axes:
        k.axis(a.axis.data, a.size.expr, reduce=a.kind.data != kernel.axis(sequential).kind.data)  # type: ignore[arg-type]
    copy, scratch = _copy(kernel, k, kept, {})
    wanted = needed_for(kernel, [*kept, *stores])
    for op in kernel.block.ops:
        if op in wanted:
            copy(op, None)
        if op in scratch:
            k.store(copy.values[op.results[0]], scratch[op], place(kernel, axes_of(op.results[0])))
    return k.finish()


def _second(kernel: KernelOp, kept: list[Operation], stores: list[Operation]) -> KernelOp:
    k = _builder(kernel, "columns")
    sequential = kernel.sequential_axis
    assert sequential is not None
    for a in kernel.axes:
        if a.axis.data != sequential:
            k.axis(a.axis.data, a.size.expr)
    size = kernel.axis(sequential).size.expr
    k.axis(sequential, size, reduce=True)
    backwards = {sequential: size - 1 - name(sequential)}
    copy, scratch = _copy(kernel, k, kept, backwards)
    wanted = needed_for(kernel, stores, given=kept)
    for op in kernel.block.ops:
        if op in scratch:
            at = place(kernel, axes_of(op.results[0])).substitute(backwards)
            copy.values[op.results[0]] = k.load(scratch[op], at)
        elif op in wanted:
            copy(op, None)
    return k.finish()


def _builder(kernel: KernelOp, which: str) -> KernelBuilder:
    return KernelBuilder(f"{kernel.sym_name.data}_{which}", [s.data for s in kernel.symbol_names])


def _copy(
    kernel: KernelOp, k: KernelBuilder, kept: list[Operation], places: dict[str, Index]
) -> tuple[Copy, dict[Operation, SSAValue]]:
    buffers = [k.buffer(element_of(b)) for b in kernel.buffers]
    scratch = {op: k.buffer(element_of(op.results[0])) for op in kept}
    return Copy(k, dict(zip(kernel.buffers, buffers, strict=True)), places), scratch
