"""Whether a kernel may loop along its reduced axis several times.

A later loop loads its inputs again. If an earlier loop has stored to one of those buffers, it would read what was
just written; then the axis must lie in one block, where every element is loaded once, before anything is stored.
"""

from __future__ import annotations

from tessera.tile.dialect.ops import KernelOp, LoadOp, StoreOp
from tessera.tile.schedules.schedule import Schedule, plan, reduced_axis
from tessera.util.errors import OptionError


def loop_hazard(kernel: KernelOp) -> bool:
    stored = set()
    for step in plan(kernel):
        loads = {op.buffer for op in step.ops if isinstance(op, LoadOp)}
        if loads & stored:
            return True
        stored |= {op.buffer for op in step.ops if isinstance(op, StoreOp)}
    return False


def check_loop(kernel: KernelOp, schedule: Schedule) -> None:
    """Refuse a schedule that loops along the reduced axis of a kernel that may not."""
    if schedule.loop and loop_hazard(kernel):
        raise OptionError(
            f"{kernel.sym_name.data} reads again what it has written along {reduced_axis(kernel)!r}: "
            "expected a schedule with the axis in one block, got a loop"
        )
    if schedule.loop and kernel.sequential_axis is not None:
        raise OptionError(
            f"{kernel.sym_name.data} sums along {kernel.sequential_axis!r}: expected a schedule with "
            f"{reduced_axis(kernel)!r} in one block, got a loop"
        )
