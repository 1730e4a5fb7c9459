"""The text of `reduce_exp` in a loop: a running maximum and a running total, rescaled where the maximum grows.

A block of the row is read as [turns, lanes, vector]: what one thread holds of it, where loads are vectors along the
row. Each lane keeps one pair, so that rescaling costs one exponential a block, no thread waits for another inside the
loop, and pairs meet once, after it. Along an axis that is not contiguous a block is one lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INFINITE = "tl.abs({0}) == float('inf')"


@dataclass(frozen=True)
class Running:
    """Names of the pair, how a block is cut, and the exponential's template."""

    top: str
    total: str
    shape: tuple[int, ...]  # of a block
    axis: int
    lanes: int  # pairs along the axis
    vector: int  # neighbours of one lane
    exp: str

    @property
    def turns(self) -> int:
        return self.shape[self.axis] // (self.lanes * self.vector)

    def _cut(self, *parts: int) -> str:
        return str([*self.shape[: self.axis], *parts, *self.shape[self.axis + 1 :]])

    def start(self, element: str) -> list[str]:
        shape = self._cut(self.lanes)
        return [
            f"{self.top} = tl.full({shape}, float('-inf'), {element})",
            f"{self.total} = tl.full({shape}, 0.0, {element})",
        ]

    def step(self, block: str, names: Sequence[str]) -> list[str]:
        """The lines inside the loop; three fresh names."""
        x, high, base = names
        first, last = self.axis, self.axis + 2
        broadcast = "".join(", None" if k in (first, last) else ", :" for k in range(len(self.shape) + 2))[2:]
        e = self.exp.format(f"({x} - {base}[{broadcast}])")
        return [
            f"{x} = tl.reshape({block}, {self._cut(self.turns, self.lanes, self.vector)})",
            f"{high} = tl.reduce(tl.reduce({x}, {last}, _maximum), {first}, _maximum)",
            f"{high} = _maximum({self.top}, {high})",
            f"{base} = {self._base(high)}",
            f"{self.total} *= {self.exp.format(f'({self.top} - {base})')}",
            f"{self.total} += tl.sum(tl.sum({e}, axis={last}), axis={first})",
            f"{self.top} = {high}",
        ]

    def _base(self, top: str) -> str:
        """What is taken off before the exponential: no difference of two infinities."""
        return f"tl.where({INFINITE.format(top)}, 0.0, {top})"

    def finish(self, top: str, total: str, infinite: str) -> list[str]:
        """The lines after the loop that join the lanes."""
        keep = ", keep_dims=True" if len(self.shape) > 1 else ""
        e = self.exp.format(f"({self.top} - {self._base(top)})")
        lines = [
            f"{top} = tl.reduce({self.top}, {self.axis}, _maximum{keep})",
            f"{total} = tl.sum({self.total} * {e}, axis={self.axis}{keep})",
        ]
        if infinite == "itself":
            lines.append(f"{total} = tl.where({INFINITE.format(top)}, float('nan'), {total})")
        return lines
