"""Matrix products on the matrix units: whether a schedule allows `tl.dot`, and in which spaces the operands stand.

`tl.dot` wants (m, r) and (r, n) blocks of one element type, at least 16 long each way, and gives (m, n). It is used
where exactly two parallel dims have blocks, each operand of every contraction has one of them, and nothing along the
reduced axis has both. Otherwise a contraction is a product and a sum, which is always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import BFloat16Type, Float16Type, Float32Type
from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect.ops import CastOp, ContractOp, KernelOp, LoadOp, ScanOp, StoreOp
from tessera.tile.dialect.types import ValueType, axes_of, element_of
from tessera.tile.targets.triton.layout import Dim, Layout
from tessera.tile.targets.triton.spaces import Space

SMALLEST = 16  # a side of a block that tl.dot takes
OPERANDS = (BFloat16Type(), Float16Type(), Float32Type())


@dataclass(frozen=True)
class DotSpaces:
    main: Space  # (m, n)
    first: Space  # (m, r)
    second: Space  # (r, n)
    unused: frozenset[Operation]  # casts that the products look through

    def space_of(self, op: Operation) -> Space | None:
        """Where an operation along the reduced axis stands; None if it varies over neither m nor n."""
        axes = _axes(op)
        if set(self.main.dims[0].axes) & axes:
            return self.first
        return self.second if set(self.main.dims[1].axes) & axes else None

    def operands(self, op: ContractOp) -> list[tuple[SSAValue, Space]]:
        """Both operands in the order of `main`, without the casts that only widen them."""
        lhs, rhs = _peeled(op)
        if not set(self.main.dims[0].axes) & set(axes_of(lhs)):
            lhs, rhs = rhs, lhs
        return [(lhs, self.first), (rhs, self.second)]

    def wanted(self, ops: Sequence[Operation]) -> dict[Operation, list[Space]]:
        """In which spaces operations along the reduced axis are wanted: where their readers stand."""
        wanted: dict[Operation, list[Space]] = {}
        for op in reversed(ops):
            if isinstance(op, ContractOp):
                continue
            own = self.space_of(op)
            if own is None:  # varies along the reduced axis alone: wherever it is used
                users = [u.operation for r in op.results for u in r.uses]
                spaces = {s: None for u in users for s in wanted.get(u, [])}
                for u in users:
                    if isinstance(u, ContractOp):
                        spaces |= {s: None for v, s in self.operands(u) if v is op.results[0]}
                wanted[op] = list(spaces) or [self.first]
            else:
                wanted[op] = [own]
        return wanted


def dot_spaces(kernel: KernelOp, layout: Layout) -> DotSpaces | None:
    """The spaces of a kernel whose contractions can run on the matrix units, or None."""
    contracts = [op for op in kernel.block.ops if isinstance(op, ContractOp)]
    blocks = [d for d in layout.parallel if d.tensor]
    reduced = layout.reduced
    if not contracts or len(blocks) != 2 or reduced is None:
        return None
    if min(d.block for d in (*blocks, reduced)) < SMALLEST:
        return None
    rows, columns = blocks
    if not all(_fits(op, rows, columns) for op in contracts):
        return None
    for op in kernel.block.ops:
        along = reduced.axes[0] in _axes(op) and not isinstance(op, ContractOp)
        if along and (isinstance(op, ScanOp) or (_over(op, rows) and _over(op, columns))):
            return None
    unused = frozenset(
        v.owner
        for op in contracts
        for v, inner in zip((op.lhs, op.rhs), _peeled(op), strict=True)
        if v is not inner and isinstance(v.owner, CastOp) and _only_contracts(v)
    )
    return DotSpaces(Space((rows, columns)), Space((rows, reduced), "_a"), Space((reduced, columns), "_b"), unused)


def _fits(op: ContractOp, rows: Dim, columns: Dim) -> bool:
    lhs, rhs = _peeled(op)
    if element_of(lhs) != element_of(rhs) or element_of(lhs) not in OPERANDS:
        return False
    if not isinstance(element_of(op.result), Float32Type):
        return False
    sides = {(bool(set(rows.axes) & set(axes_of(v))), bool(set(columns.axes) & set(axes_of(v)))) for v in (lhs, rhs)}
    return sides == {(True, False), (False, True)}


def _peeled(op: ContractOp) -> tuple[SSAValue, SSAValue]:
    """Operands before a cast of both from the same narrow type to f32: their products are the same numbers."""
    inner = [v.owner.arg if isinstance(v.owner, CastOp) else v for v in (op.lhs, op.rhs)]
    narrow = all(element_of(v) in OPERANDS[:2] for v in inner) and element_of(inner[0]) == element_of(inner[1])
    wide = all(isinstance(element_of(v), Float32Type) for v in (op.lhs, op.rhs))
    return (inner[0], inner[1]) if narrow and wide else (op.lhs, op.rhs)


def _only_contracts(v: SSAValue) -> bool:
    return all(isinstance(u.operation, ContractOp) and v not in _peeled(u.operation) for u in v.uses)


def _axes(op: Operation) -> set[str]:
    axes = {a for r in op.results if isinstance(r.type, ValueType) for a in r.type.axis_names}
    if isinstance(op, StoreOp) or not op.results:
        axes |= set(op.at.expr.names()) if isinstance(op, StoreOp) else set()
        axes |= {a for v in op.operands if isinstance(v.type, ValueType) for a in v.type.axis_names}
    elif not isinstance(op, LoadOp):
        axes |= {a for v in op.operands if isinstance(v.type, ValueType) for a in v.type.axis_names}
    return axes


def _over(op: Operation, dim: Dim) -> bool:
    return bool(set(dim.axes) & _axes(op))
