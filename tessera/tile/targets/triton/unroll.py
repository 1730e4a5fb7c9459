"""What is asked of memory before anything is computed: several blocks of the reduced axis in one step of a loop.

    before:  each step loads a block, waits for it and adds it to what the loop carries
    -->
    after:   each step loads `blocks` of them, one after the other, and adds each to the same carried block

What a loop carries stays as small as one block, so that a thread has registers for loads that are on their way. With
one large block instead the compiler saves registers by loading late, one access after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import Operation

from tessera.tile.dialect.ops import ApplyOp, CastOp, ConstantOp, IotaOp, LoadOp, ReduceExpOp, ScanOp, StoreOp
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.triton.layout import Dim

# what `extra` says: so many blocks in a step; all that a small kernel reads is asked for before it computes
BLOCKS, LOADS_FIRST = "blocks", "loads_first"


def blocks_of_a_step(schedule: Schedule, ops: Sequence[Operation], dim: Dim) -> int:
    """As many as the schedule says, or fewer where a step would have to be masked that needs no mask otherwise."""
    if any(isinstance(op, (ScanOp, ReduceExpOp)) for op in ops) or _writes_what_it_reads(ops):
        return 1  # blocks that wait for one another
    count = dict(schedule.extra).get(BLOCKS, 1)
    assert isinstance(count, int)
    while count > 1 and not dim.masked and dim.size.constant is not None and dim.size.constant % (dim.block * count):
        count //= 2
    return count


def loads_first(ops: Sequence[Operation]) -> tuple[list[Operation], list[Operation]]:
    """Loads that wait for no other, with what their places and masks need; and the rest."""
    if _writes_what_it_reads(ops):
        return [], list(ops)
    inside, ready = set(ops), set()
    for op in ops:
        waits = any(isinstance(v.owner, Operation) and v.owner in inside - ready for v in op.operands)
        if not waits and isinstance(op, (ConstantOp, IotaOp, ApplyOp, CastOp)):
            ready.add(op)
    first: set[Operation] = set()
    for op in reversed(ops):
        needs = [v.owner for v in op.operands if v.owner in inside]
        if op in first or (isinstance(op, LoadOp) and all(owner in ready for owner in needs)):
            first.update((op, *needs))  # type: ignore[arg-type]
    return [op for op in ops if op in first], [op for op in ops if op not in first]


def _writes_what_it_reads(ops: Sequence[Operation]) -> bool:
    """Whether a load may have to wait for a store before it. What is overwritten in place is another buffer here, of
    which every element is read where it is written (`tile.overwrite`)."""
    return bool(
        {op.buffer for op in ops if isinstance(op, LoadOp)} & {op.buffer for op in ops if isinstance(op, StoreOp)}
    )
