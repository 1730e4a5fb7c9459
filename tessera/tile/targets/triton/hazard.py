"""Whether a kernel may loop along its reduced axis several times.

A later loop loads its inputs again. If an earlier loop has stored to one of those buffers, it would read what was
just written; then the axis must lie in one block, where every element is loaded once, before anything is stored.
"""

from __future__ import annotations

from tessera.tile.dialect.ops import KernelOp, LoadOp, StoreOp
from tessera.tile.schedules.schedule import plan


def loop_hazard(kernel: KernelOp) -> bool:
    stored = set()
    for step in plan(kernel):
        loads = {op.buffer for op in step.ops if isinstance(op, LoadOp)}
        if loads & stored:
            return True
        stored |= {op.buffer for op in step.ops if isinstance(op, StoreOp)}
    return False
