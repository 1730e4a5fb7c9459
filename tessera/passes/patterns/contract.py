"""Products written as a multiplication and a sum become products.

In: a trace. Out: the same program, where `(a * b).sum(dims)` over operands that each vary where the other is broadcast
is one `bmm`: `(C[:, :, None] * B[:, None]).sum(-1)` is `C @ B.mT`. Dimensions that both operands have and the sum keeps
are the batch, those that it takes away are summed, and those of one operand alone are rows or columns. A kernel that
multiplies and sums computes as much without matrix units, and reads every element once for each of the other's. Where
there are no rows or no columns (a GEMV), or little work, the sum stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ir.types import Size, size_hint, size_key
from tessera.ops.families import cast, product, wrap

SUMS = ("sum", "mean")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NARROW = 8  # rows, columns or summed elements below which a library's product has little to share
WORK = 1 << 22  # multiplications that are worth the launch
REUSE = 8  # multiplications for each element that a product reads or writes, beside a copy of each


@dataclass(frozen=True)
class Operand:
    """A factor, and which dimensions of the multiplication it has; it is broadcast over the others."""

    value: Value
    rank: int

    def has(self, dim: int) -> bool:
        own = dim - self.rank + self.value.ndim
        return own >= 0 and size_key(self.value.shape[own]) != 1

    def lay(self, dims: Iterable[int]) -> Value:
        """The operand with these of its dimensions in this order; the others are of one element."""
        shift = self.rank - self.value.ndim
        order = [d - shift for d in dims]
        order += [d for d in range(self.value.ndim) if d not in order]
        return self.value if order == sorted(order) else aten.permute(self.value, order)


@dataclass(frozen=True)
class Contraction:
    left: Operand
    right: Operand
    shape: tuple[Size, ...]  # of the multiplication
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    summed: tuple[int, ...]

    def size(self, dims: Iterable[int]) -> Size:
        return product([self.shape[d] for d in dims])

    def pays(self) -> bool:
        count, rows, columns, summed = (
            size_hint(self.size(dims)) for dims in (self.batch, self.rows, self.columns, self.summed)
        )
        work = count * rows * columns * summed
        touched = count * (rows * summed + summed * columns + rows * columns)
        return min(rows, columns, summed) >= NARROW and work >= max(WORK, REUSE * touched)


def contract(trace: Trace) -> Trace:
    """Sums of products as products, where that pays."""
    if not any(eqn.opname in SUMS for eqn in trace.equations):
        return trace
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        contraction = _contraction(eqn, rewrite) if eqn.opname in SUMS else None
        if contraction is not None and contraction.pays():
            rewrite.replace(eqn, functools.partial(_product, contraction))
    return rewrite.finish()


def _contraction(eqn: Equation, rewrite: Rewrite) -> Contraction | None:
    (x, *rest), _ = eqn.bound()
    multiply = rewrite.maker(x, "mul")
    if multiply is None or rewrite.reader(x) is None or multiply.tags != eqn.tags or not rest:
        return None
    if x.dtype not in DTYPES or eqn.out.dtype != x.dtype or _rounds_products(x):  # type: ignore[union-attr]
        return None
    factors = [a for a in multiply.args if isinstance(a, Value)]
    if len(factors) != 2 or any(v.tensor.device != eqn.out.tensor.device for v in factors):
        return None
    shape = multiply.out.shape
    left, right = (Operand(_before_expand(v, rewrite), len(shape)) for v in factors)
    dims = rest[0] if isinstance(rest[0], (list, tuple)) else None
    over = set(range(len(shape))) if not dims else {wrap(d, len(shape)) for d in dims}
    return _sorted_out(left, right, shape, over)


def _rounds_products(x: Value) -> bool:
    """A user who lets products of float32 round their operands has not said so of sums."""
    return x.dtype is torch.float32 and x.tensor.device.type == "cuda" and bool(torch.backends.cuda.matmul.allow_tf32)


def _before_expand(v: Value, rewrite: Rewrite) -> Value:
    while (maker := rewrite.maker(v, "expand")) is not None:
        v = maker.inputs()[0]
    return v


def _sorted_out(left: Operand, right: Operand, shape: tuple[Size, ...], over: set[int]) -> Contraction | None:
    """Which dimension is what; None where one that is summed is of one operand alone, or there is no matrix."""
    batch, rows, columns, summed = [], [], [], []
    for d in range(len(shape)):
        match (left.has(d), right.has(d), d in over):
            case (True, True, True):
                summed.append(d)
            case (True, True, False):
                batch.append(d)
            case (True, False, False):
                rows.append(d)
            case (False, True, False):
                columns.append(d)
            case (False, False, _):
                pass  # one element
            case _:
                return None
    if not rows or not columns or not summed:
        return None
    if columns[0] < rows[0]:  # the result's own order, so that it need not be copied
        left, right, rows, columns = right, left, columns, rows
    return Contraction(left, right, shape, tuple(batch), tuple(rows), tuple(columns), tuple(summed))


def _product(c: Contraction, eqn: Equation) -> Value:
    dtype, count = eqn.out.dtype, c.size(c.batch)
    rows, columns, summed = c.size(c.rows), c.size(c.columns), c.size(c.summed)
    left = cast(c.left.lay((*c.batch, *c.rows, *c.summed)), dtype)
    right = cast(c.right.lay((*c.batch, *c.summed, *c.columns)), dtype)
    y = aten.bmm(aten.reshape(left, [count, rows, summed]), aten.reshape(right, [count, summed, columns]))
    if eqn.opname == "mean":
        y = aten.div(y, summed)
    order = (*c.batch, *c.rows, *c.columns)
    if list(order) != sorted(order):
        y = aten.permute(aten.reshape(y, [c.shape[d] for d in order]), [order.index(d) for d in sorted(order)])
        y = aten.clone(y, memory_format=torch.contiguous_format)
    return aten.reshape(y, list(eqn.out.shape))
