"""Writes attention as one cuTile loop over the keys.

In: a kernel in which `tile/rewrites/flash` finds attention. Out: the module's text. For a block of queries the loop
carries the largest score so far, the sum of exponentials and the sum of values; whenever a larger score comes, both
sums are scaled down by the exponential of the difference. What is done to scores, and what follows the loop, is written
as it stands. Keys past the last have a score of -inf, so that their exponentials are zero wherever they are summed.
"""

from __future__ import annotations

import math

from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect.ops import ContractOp, KernelOp, StoreOp
from tessera.tile.dialect.types import axes_of
from tessera.tile.rewrites.copying import needed_for
from tessera.tile.rewrites.flash import after_keys, flash_of, is_causal, made_over
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.cuda_tile.emit import Emitter
from tessera.tile.targets.cuda_tile.writing import Tile

LEAST = 'float("-inf")'


class Flash(Emitter):
    def __init__(self, kernel: KernelOp, schedule: Schedule) -> None:
        super().__init__(kernel, schedule)
        self.parts = flash_of(kernel)
        self.axis = self.parts.result.axis.data
        self.rows = tuple(a for a in axes_of(self.parts.top.arg) if a != self.axis)

    def write(self) -> None:
        ops, late = list(self.kernel.block.ops), after_keys(self.kernel, self.parts)
        along = [op for op in ops if self.axis in made_over(op)]
        for op in ops:
            if op not in along and op not in late and op not in self.parts.ends:
                self.operation(op)
        self._walk(along, [op for op in late if op in self.parts.lowering])
        stored = needed_for(self.kernel, [op for op in late if isinstance(op, StoreOp)], given=self.parts.ends)
        for op in late:
            if op in stored:
                self.operation(op)

    def _walk(self, along: list[Operation], lowering: list[Operation]) -> None:
        self.enter(self.axis)
        for op in along:
            if op is self.parts.below:
                self._larger(lowering)
            self.operation(op)
        self._gather()
        self.leave(self._end())

    def contract(self, op: ContractOp) -> Tile | None:
        """Scores are made anew in every step."""
        product = self.product(op)
        return Tile(product.whole.format(product.step(product.start)), product.axes)

    def padded(self, v: SSAValue, fill: str, axis: str) -> str:
        """Products are of what is loaded, which is zero past the end, and of exponentials, which are as well."""
        return self.tiles[v].text

    def _larger(self, lowering: list[Operation]) -> None:
        """The largest score so far, and what is subtracted for it."""
        top, score = self.parts.top, self.tiles[self.parts.top.arg]
        self.before_loop(f"top = ct.full({self.shape(self.rows)}, {LEAST}, ct.float32)")
        if self.masked(self.axis):
            inside = self.aligned(self.inside(self.axis), score.axes)
            score = self.tiles[top.arg] = self.assign(
                "score", Tile(f"ct.where({inside}, {score.text}, {LEAST})", score.axes)
            )
        largest = f"ct.maximum(top, ct.max({score.text}, {score.axes.index(self.axis)}))"
        self.tiles[top.result] = self.assign("top_here", Tile(largest, self.rows))
        for op in lowering:
            self.operation(op)

    def _gather(self) -> None:
        """This step's keys into what was gathered before, which fades as the largest score grows."""
        total, result = self.parts.total, self.parts.result
        weights, product = self.tiles[total.arg], self.product(result)
        self.before_loop(f"total = ct.zeros({self.shape(self.rows)}, ct.float32)")
        self.before_loop(f"acc = {product.start}")
        height = math.prod(self.blocks[a] for a in self.rows)
        self.scope.body += [
            f"fade = ct.exp(top - {self.aligned(self.parts.low, self.rows)})",
            f"total = total * fade + ct.sum({weights.text}, {weights.axes.index(self.axis)})",
            f"acc = {product.step(f'acc * ct.reshape(fade, {(height, 1)})')}",
            "top = top_here",
        ]
        self.tiles[self.parts.top.result], self.tiles[total.result] = Tile("top", self.rows), Tile("total", self.rows)
        self.after.append(f"{self.name_of(result.result)} = {product.whole.format('acc')}")
        self.tiles[result.result] = Tile(self.name_of(result.result), product.axes)

    def _end(self) -> str:
        """How many blocks of keys there are; queries that see keys up to their own position need none after it."""
        steps = self.steps(self.axis)
        causal = [a for a in self.rows if is_causal(self.parts, a)]
        if not causal:
            return steps
        (row,) = causal
        block = self.blocks[row]
        return f"ct.minimum({steps}, ct.cdiv({row}_tile * {block} + {block}, {self.blocks[self.axis]}))"
