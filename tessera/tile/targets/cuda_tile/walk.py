"""Writes a kernel that works row by row and sums over the rows as well as one cuTile loop over blocks of rows.

In: a kernel with a walked axis, a schedule that holds its rows whole. Out: the module's text. Every program goes all
along the walked axis and carries a row of sums for each row of a block; these are added when the walk has ended.
"""

from __future__ import annotations

from tessera.tile.dialect.ops import KernelOp, StoreOp
from tessera.tile.rewrites.flash import made_over
from tessera.tile.schedules.schedule import Schedule, after_walk
from tessera.tile.targets.cuda_tile.emit import Emitter


class Walk(Emitter):
    def __init__(self, kernel: KernelOp, schedule: Schedule) -> None:
        super().__init__(kernel, schedule)
        assert kernel.walked is not None
        self.walked = kernel.walked
        self.later = after_walk(kernel)

    def write(self) -> None:
        sums = self.kernel.sums_along(self.walked)
        ops = [op for op in self.kernel.block.ops if op not in self.later]
        inside = [op for op in ops if self.walked in made_over(op) or op in sums or isinstance(op, StoreOp)]
        for op in ops:
            if op not in inside:
                self.operation(op)
        self.enter(self.walked)
        for op in inside:
            self.operation(op)
        self.leave(self.steps(self.walked))
        for op in self.later:
            self.operation(op)
