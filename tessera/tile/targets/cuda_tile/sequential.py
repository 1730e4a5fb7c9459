"""Writes a kernel that works row by row and sums over the rows as well as one cuTile loop over blocks of rows.

In: a kernel with a sequential axis, a schedule that holds its rows whole. Out: the module's text. Every program goes
all along the sequential axis and carries a row of sums for each row of a block; these are added when the loop ends.
"""

from __future__ import annotations

from tessera.tile.dialect.ops import KernelOp, StoreOp
from tessera.tile.rewrites.flash import made_over
from tessera.tile.schedules.schedule import Schedule, after_sums
from tessera.tile.targets.cuda_tile.emit import Emitter


class Sequential(Emitter):
    def __init__(self, kernel: KernelOp, schedule: Schedule) -> None:
        super().__init__(kernel, schedule)
        assert kernel.sequential_axis is not None
        self.sequential = kernel.sequential_axis
        self.later = after_sums(kernel)

    def write(self) -> None:
        sums = self.kernel.sums_along(self.sequential)
        ops = [op for op in self.kernel.block.ops if op not in self.later]
        inside = [op for op in ops if self.sequential in made_over(op) or op in sums or isinstance(op, StoreOp)]
        for op in ops:
            if op not in inside:
                self.operation(op)
        self.enter(self.sequential)
        for op in inside:
            self.operation(op)
        self.leave(self.steps(self.sequential))
        for op in self.later:
            self.operation(op)
