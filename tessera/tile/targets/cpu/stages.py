"""The passes of a kernel as the CPU runs them: what stands outside the vector loop, what is kept between loops.

`schedule.plan` gives straight passes and loops along the reduced axis. Here each is divided into what varies along a
parallel vector axis and what does not (which runs first, once a row), and an expensive value that several loops need
is computed in the first and kept in scratch memory for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.ops import (
    ApplyOp,
    CastOp,
    ConstantOp,
    ContractOp,
    LoadOp,
    ReduceExpOp,
    ReduceOp,
    ScanOp,
    StoreOp,
)
from tessera.tile.schedules.schedule import plan
from tessera.tile.targets.cpu.layout import Layout

WORTH_KEEPING = 6  # instructions an element, against one store and one load


@dataclass
class Stage:
    """Operations in order; a loop where `loop` is set."""

    loop: bool
    ops: list[Operation]
    keep: set[SSAValue] = field(default_factory=set)  # written to scratch here
    take: list[SSAValue] = field(default_factory=list)  # read from scratch here, in an order that every process has


def stages(seen: Layout, vector: str | None) -> tuple[list[Stage], list[Stage]]:
    """Those that do not vary along a parallel vector axis, and those that do (or all, if it is the reduced one)."""
    everything = [Stage(p.axis is not None, list(p.ops)) for p in plan(seen.kernel)]
    if vector is None or vector == seen.reduced:
        return [], everything
    before, inside = [], []
    for stage in everything:
        for varies, out in ((False, before), (True, inside)):
            ends = [op for op in stage.ops if (vector in _axes(seen, op)) == varies]
            if stage.loop:
                ends = [op for op in ends if is_end(op, seen.reduced)]
                ops = closure(stage.ops, set(ends), set())
            else:
                ops = ends
            if ops:
                out.append(Stage(stage.loop, ops))
    return before, inside


def _axes(seen: Layout, op: Operation) -> frozenset[str]:
    return seen.axes_of_op(op)


def is_end(op: Operation, axis: str | None) -> bool:
    """What a loop runs for: stores and reductions."""
    return isinstance(op, (StoreOp, ReduceOp, ReduceExpOp, ContractOp))


def closure(ops: list[Operation], wanted: set[Operation], given: set[SSAValue]) -> list[Operation]:
    """The operations among `ops` that `wanted` needs, stopping at values that are given."""
    needed = set(wanted)
    for op in reversed(ops):
        if op in needed:
            needed.update(v.owner for v in op.operands if v not in given and isinstance(v.owner, Operation))
    return [op for op in ops if op in needed]


def keep_between(listed: list[Stage]) -> None:
    """Choose what loops keep for later ones; changes the stages in place."""
    computed: dict[SSAValue, Stage] = {}
    for stage in listed:
        if not stage.loop:
            continue
        mine = set(stage.ops)
        # a value varies inside the loop if its owner is one of the loop's operations
        ends = {op for op in stage.ops if is_end(op, None)}
        taken: set[SSAValue] = set()
        for op in reversed(closure(stage.ops, ends, taken)):
            for v in op.operands:
                if v in computed and v.owner in mine and _price(v, mine) >= WORTH_KEEPING:
                    taken.add(v)
        if taken:
            left = closure(stage.ops, ends, taken)
            needed = dict.fromkeys(v for op in left for v in op.operands)
            stage.ops, stage.take = left, [v for v in needed if v in taken]
            for v in stage.take:
                computed[v].keep.add(v)
        for op in stage.ops:
            if op.results and not is_end(op, None):
                computed.setdefault(op.results[0], stage)


def _price(v: SSAValue, among: set[Operation]) -> int:
    """Instructions that compute a value again from memory; a scan cannot be had again any cheaper."""
    seen: set[Operation] = set()
    todo, total = [v.owner], 0
    while todo:
        op = todo.pop()
        if not isinstance(op, Operation) or op in seen or op not in among:
            continue
        seen.add(op)
        match op:
            case ApplyOp():
                total += FUNCTIONS[op.fn.data].cost
            case ScanOp():
                total += 10
            case LoadOp():
                total += 6 if op.indices else 0
            case CastOp() | ConstantOp():
                pass
        todo.extend(x.owner for x in op.operands)
    return total
