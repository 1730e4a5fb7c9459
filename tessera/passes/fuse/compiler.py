"""What fusion is told about kernels, and what a group of equations computes over.

A `Compiler` answers about single equations and about whole kernels; `Work` is what fusion keeps of a group. Both are
plain data, so that a test can fuse for a compiler that it makes up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tessera.ir.equation import Equation
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_hint
from tessera.ops.fp8 import rounds

TURNED = 1 << 18  # elements from which a copy that makes columns of rows is worth a launch of its own
POINTWISE, VIEW, SELECT, SOURCE, REDUCE, SCAN = "pointwise", "view", "select", "source", "reduce", "scan"
CONTRACT = "contract"


@dataclass(frozen=True)
class Compiler:
    """`kind(eqn)` is one of the words above, or empty with `why_not(eqn)` saying why; `reduced(eqn)` the dimensions of
    its first argument that a reduction or scan runs over; `expensive(eqn)` that it should not be computed twice;
    `check(body)` a kernel's cost a point and, where there is none, the reason; `alone(eqn)` that a kernel of this one
    equation beats the library's; `loses(products, body, saved)` why a kernel of ours around these products, which would
    move `saved` bytes less, loses to the library's (without a number they have a kernel already); `writes(eqn)` that a
    reduction of outer dimensions has programs enough to write its argument too; `once(eqn)` that a kernel over more
    points, which would compute it at each of them, takes longer than one that computes it and one that reads it;
    `rereads(eqn)` the same of whatever is in front of it, because it reads each point several times."""

    kind: Callable[[Equation], str]
    why_not: Callable[[Equation], str]
    reduced: Callable[[Equation], list[int]]
    expensive: Callable[[Equation], bool]
    check: Callable[[Trace], tuple[float, str]]
    alone: Callable[[Equation], bool] = lambda eqn: False
    loses: Callable[[list[Equation], Trace, int | None], str] = lambda products, body, saved: ""
    writes: Callable[[Equation], bool] = lambda eqn: False
    once: Callable[[Equation], bool] = lambda eqn: False
    rereads: Callable[[Equation], bool] = lambda eqn: False


@dataclass
class Work:
    """What a group of equations computes over."""

    points: int  # of its space
    rows: int  # points that are not reduced away; the same as points where nothing is
    outer: bool = False  # reduces dimensions that are not the innermost
    walks: bool = False  # reduces the innermost, and sums over the others beside that
    runs: bool = False  # has running sums: a result at every point, ready as soon as its kernel is there
    cost: float = 0.0
    counted: bool = True  # `cost` was counted, not guessed from below
    products: tuple[int, ...] = ()  # equations that are matrix products

    @property
    def reduces(self) -> bool:
        return self.rows != self.points

    @property
    def columns(self) -> int:
        return self.points // max(self.rows, 1)

    def space(self) -> Work:
        """The same points and rows, of a group whose cost is yet to be counted."""
        return Work(self.points, self.rows, self.outer, self.walks, self.runs)

    def walks_with(self, sums: Work) -> bool:
        """This works row by row, the other sums over those rows."""
        return (
            self.reduces and not self.outer and sums.outer and self.points == sums.points and self.columns == sums.rows
        )


def widens(eqn: Equation) -> bool:
    """A cast of floats to a type of more bytes."""
    if eqn.op is not torch.ops.aten._to_copy.default or len(eqn.inputs()) != 1:
        return False
    before, after = eqn.inputs()[0].tensor, eqn.out.tensor
    same = before.device == after.device and before.stride == after.stride
    return same and before.is_float and after.is_float and before.dtype.itemsize < after.dtype.itemsize


def turns(eqn: Equation) -> bool:
    """A copy that makes columns of rows: of numbers of 8 bits, or a large one on a GPU. Tiles write those well; a
    kernel that has a row at a time writes a number here and a number there, 20 ms for 75 MB on an H200."""
    if eqn.opname not in ("contiguous", "clone", "_to_copy"):
        return False
    before, after = eqn.inputs()[0].tensor, eqn.out.tensor
    large = after.device.type == "cuda" and size_hint(after.numel()) >= TURNED
    return (large or rounds(eqn)) and innermost(before) != innermost(after)


def innermost(t: TensorType) -> list[int]:
    return [d for d in range(t.ndim) if size_hint(t.stride[d]) == 1 and size_hint(t.shape[d]) > 1]


def is_outer(eqn: Equation, dims: list[int]) -> bool:
    """Reduces dimensions that are not the innermost of its argument."""
    t = eqn.inputs()[0].tensor
    inner = innermost(t)
    return bool(inner) and not set(inner) & set(dims)
