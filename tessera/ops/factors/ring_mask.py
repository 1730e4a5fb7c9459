"""A mask over queries and keys where keys go round a ring.

In: a rank's rows of a mask, which has the columns of all keys, and how keys are cut. Out: at each step the columns of
the keys that have come, and which queries see any of those. Columns are chosen by places that depend on the rank, so
one text serves all ranks. A mask of numbers is shifted, row by row, so that its largest is 0: softmax does not see
that, and log-sum-exps of chunks that are all far below stay comparable.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.ir.builder import aten
from tessera.ir.equation import Value

LOWEST = float("-inf")


@dataclass(frozen=True)
class Mask:
    rows: Value  # [..., queries of a rank or 1, all keys or 1]; what was expanded is one
    rank: Value  # the place of a rank in the ring
    ranks: int
    zigzag: bool

    @classmethod
    def of(cls, mask: Value, rank: Value, ranks: int, zigzag: bool) -> Mask:
        for d, stride in enumerate(mask.tensor.stride[:-1]):
            if stride == 0:  # the same for all: columns are chosen of one
                mask = aten.slice(mask, d, 0, 1)
        if mask.dtype.is_floating_point:
            largest = aten.amax(mask, [-1], True)
            mask = aten.sub(mask, aten.where(aten.eq(largest, LOWEST), aten.zeros_like(largest), largest))
        return cls(mask, rank, ranks, zigzag)

    def at(self, step: int) -> Value:
        """The columns of the keys that stand before a rank's queries at a step: those of the rank so many places
        back."""
        if self.rows.shape[-1] == 1:
            return self.rows
        owner = aten.remainder(aten.sub(self.rank, step), self.ranks)
        chunks = [owner, aten.rsub(owner, 2 * self.ranks - 1)] if self.zigzag else [owner]
        size = int(self.rows.shape[-1]) // (self.ranks * len(chunks))
        within = aten.arange(size, device=self.rows.tensor.device)
        places = [aten.add(aten.mul(chunk, size), within) for chunk in chunks]
        return aten.index_select(self.rows, -1, aten.cat(places) if len(places) > 1 else places[0])


def sees(mask: Value) -> Value:
    """Whether a query may look at any of these keys."""
    return aten.gt(aten.amax(mask, [-1]), LOWEST) if mask.dtype.is_floating_point else aten.any(mask, -1)
