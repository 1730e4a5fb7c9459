"""Which of all rows count, where a program over rows that a mask selects is written over all rows.

In: masks, the number that stood for the rows of each while the program was traced, and what the program makes of such
rows: others that are chosen among them, several of one, several sets behind each other. Out: for each a `Mask`, one
and the same where it is made alike, so that values which have the same rows can be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.ir.builder import aten
from tessera.ir.equation import Value


@dataclass(frozen=True, eq=False)
class Mask:
    rows: Value  # which of all rows
    count: Value  # how many of them
    every: int  # how many there are in all
    sizes: tuple[int, int, int]  # what stood for their number: here, where twice as many were, and where few
    shape: tuple[int, ...] = ()  # of the mask that selected them; of what is made of such rows, nothing
    base: Mask | None = None  # each of its rows is `each` rows of this mask
    each: int = 1
    first: bool = False  # they stand before all others

    @property
    def size(self) -> int:
        return self.sizes[0]


class Masks:
    """`fewest`: how many rows stood for few."""

    def __init__(self, fewest: int) -> None:
        self.fewest = fewest
        self.selected: dict[int, Mask] = {}  # by the number that stood for the rows
        self.made: dict[tuple, Mask] = {}

    def all(self) -> list[Mask]:
        return [*self.selected.values(), *self.made.values()]

    def of_size(self, size: object) -> Mask | None:
        """The only mask with so many rows, in their order."""
        found = [mask for mask in self.all() if mask.size == size and not mask.first]
        return found[0] if len(found) == 1 else None

    def select(self, size: int, rows: Value, shape: tuple[int, ...]) -> Mask:
        """Rows that the program selects; `rows` says so of all rows."""
        every = rows.shape[0]
        assert isinstance(every, int)
        if size not in self.selected:
            self.selected[size] = Mask(rows, aten.sum(rows), every, (size, 2 * size, self.fewest), shape)
        return self.selected[size]

    def split(self, mask: Mask, size: object) -> Mask | None:
        """Rows of which each is a part of a row, or several rows are one: `size` of them."""
        base = mask.base or mask
        if not isinstance(size, int) or size % base.size:
            return None
        times = size // base.size
        if times == 1:
            return base
        if (base, times) not in self.made:
            rows = aten.expand(aten.reshape(base.rows, [base.every, 1]), [base.every, times])
            sizes = (times * base.sizes[0], times * base.sizes[1], times * base.sizes[2])
            rows, count = aten.reshape(rows, [base.every * times]), aten.mul(base.count, times)
            self.made[base, times] = Mask(rows, count, base.every * times, sizes, (), base, times)
        return self.made[base, times]

    def ordered(self, mask: Mask) -> Mask:
        """As many rows, which stand before all others."""
        if mask.first:
            return mask
        if ("first", mask) not in self.made:
            rows = aten.lt(aten.arange(0, mask.every, device=mask.rows.tensor.device), mask.count)
            self.made["first", mask] = Mask(rows, mask.count, mask.every, mask.sizes, first=True)
        return self.made["first", mask]

    def joined(self, parts: Sequence[Mask | int]) -> Mask:
        """Rows behind rows; of a number, all count."""
        key = ("cat", *parts)
        if key not in self.made:
            like = next(part for part in parts if isinstance(part, Mask))
            rows = [p.rows if isinstance(p, Mask) else aten.new_ones(like.rows, [p]) for p in parts]
            every = sum(p.every if isinstance(p, Mask) else p for p in parts)
            triples = [p.sizes if isinstance(p, Mask) else (p, p, p) for p in parts]
            here, twice, few = (sum(sizes) for sizes in zip(*triples, strict=True))
            whole = aten.cat(rows, 0)
            self.made[key] = Mask(whole, aten.sum(whole), every, (here, twice, few))
        return self.made[key]
