"""How a kernel is run: data beside the kernel, never part of it.

A Schedule says how many elements of each axis one program handles at once, and how many programs, warps and
stages there are. `plan` turns a kernel into the passes that any target emits: straight parts, which do not vary
along the reduced axis, and loops along it, as few as the data flow allows. Where an axis is sequential, these are
the passes of one step; `after_sums` is what is left to do with the sums when its loop has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect.ops import REDUCE, ContractOp, KernelOp, ReduceOp, StoreOp
from tessera.tile.dialect.types import ValueType, axes_of


@dataclass(frozen=True)
class Schedule:
    """Blocks by axis (an axis not named has block 1); the rest are hints a target may not know."""

    blocks: tuple[tuple[str, int], ...] = ()
    warps: int = 4
    stages: int = 2
    loop: bool = False  # a loop over blocks of the reduced axis; otherwise one block holds all of it
    split: int = 1  # programs that share a reduction or sequential axis; each stores a part, a second kernel adds them
    persistent: bool = False  # as many programs as the chip runs at once, each walking over several blocks
    group: int = 1  # rows of blocks run together, for the L2 cache
    extra: tuple[tuple[str, object], ...] = field(default=())  # a target's own switches

    def block(self, axis: str) -> int:
        return dict(self.blocks).get(axis, 1)


def read_schedule(fields: dict) -> Schedule:
    """A schedule from its fields as JSON gives them."""
    pairs = {name: tuple((key, value) for key, value in fields[name]) for name in ("blocks", "extra")}
    return Schedule(**{**fields, **pairs})


@dataclass(frozen=True)
class Pass:
    """Operations in order. With `axis`, a loop along it; its reductions are ready when it ends."""

    axis: str | None
    ops: tuple[Operation, ...]


def inner_axis(kernel: KernelOp) -> str | None:
    """An axis that is contracted once for every step along another reduced one, as the head's width in attention."""
    names = kernel.axis_names(REDUCE)
    for op in kernel.block.ops if len(names) > 1 else ():
        if isinstance(op, ContractOp) and set(axes_of(op.result)) & set(names):
            return op.axis.data
    return None


def reduced_axis(kernel: KernelOp) -> str | None:
    """The axis that loops run along."""
    names = [n for n in kernel.axis_names(REDUCE) if n != inner_axis(kernel)]
    assert len(names) <= 1, f"{kernel.sym_name.data}: one reduced axis a kernel, got {names}"
    return names[0] if names else None


def plan(kernel: KernelOp) -> list[Pass]:
    """Straight passes and loops along the reduced axis, in order.

    A value that varies along the axis is computed again in every loop that needs it; a reduction belongs to the
    first loop in which its argument can be computed.
    """
    axis, sequential = reduced_axis(kernel), kernel.sequential_axis
    ops = list(kernel.block.ops)
    if axis is None:
        return [Pass(None, tuple(ops))]
    if sequential is not None:
        later = set(after_sums(kernel))
        ops = [op for op in ops if op not in later]
    level = _levels(ops, axis)
    passes: list[Pass] = []
    for stage in range(max(level.values(), default=0) + 1):
        straight = [op for op in ops if not _varies(op, axis) and level[op] == stage and not _reduces(op, axis)]
        if straight:
            passes.append(Pass(None, tuple(straight)))
        ends = [op for op in ops if level[op] == stage and _varies(op, axis) and _ends(op, sequential)]
        ends += [op for op in ops if _reduces(op, axis) and level[op] == stage + 1]
        if ends:
            passes.append(Pass(axis, _closure(ops, ends, axis)))
    return passes


def _ends(op: Operation, sequential: str | None) -> bool:
    return isinstance(op, StoreOp) or (isinstance(op, ReduceOp) and op.axis.data == sequential)


def after_sums(kernel: KernelOp) -> list[Operation]:
    """What needs the sums along the sequential axis."""
    if kernel.sequential_axis is None:
        return []
    ready = {op.result for op in kernel.sums_along(kernel.sequential_axis)}
    later: list[Operation] = []
    for op in kernel.block.ops:
        if ready & set(op.operands):
            later.append(op)
            ready.update(op.results)
    return later


def _reduces(op: Operation, axis: str) -> bool:
    return bool(op.results) and not _result_varies(op, axis) and any(axis in axes_of(v) for v in _values(op))


def _values(op: Operation) -> list[SSAValue]:
    return [v for v in op.operands if isinstance(v.type, ValueType)]


def _result_varies(op: Operation, axis: str) -> bool:
    return any(isinstance(r.type, ValueType) and axis in r.type.axis_names for r in op.results)


def _varies(op: Operation, axis: str) -> bool:
    """Runs once for every position along the axis."""
    if isinstance(op, StoreOp):
        return axis in op.at.expr.names() or any(axis in axes_of(v) for v in _values(op))
    return _result_varies(op, axis)


def _levels(ops: list[Operation], axis: str) -> dict[Operation, int]:
    """How many reductions, one after another, an operation waits for."""
    level: dict[Operation, int] = {}
    for op in ops:
        before = [level[v.owner] for v in op.operands if isinstance(v.owner, Operation)]
        level[op] = max(before, default=0) + int(_reduces(op, axis))
    return level


def _closure(ops: list[Operation], ends: list[Operation], axis: str) -> tuple[Operation, ...]:
    """The operations a loop runs to reach its ends."""
    wanted = set(ends)
    for op in reversed(ops):
        if op in wanted:
            wanted.update(
                v.owner for v in op.operands if isinstance(v.owner, Operation) and _result_varies(v.owner, axis)
            )
    return tuple(op for op in ops if op in wanted)
