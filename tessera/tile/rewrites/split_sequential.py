"""A sequential axis that many programs share.

    before:  y[i, r] = f(x[i, r], sum over r of x[i, r]);  z[r] = g(sum over i < n of x[i, r])
    -->
    first:   y as before, for the rows part, part + parts, part + 2 * parts, …
             scratch[part, r] = sum over those rows of x[i, r]
    second:  z[r] = g(sum over part of scratch[part, r])

It is for kernels that work row by row and sum over the rows as well: the gradients of norms.
"""

from __future__ import annotations

from tessera.tile.dialect.index import name
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.rewrites.copying import needed_for
from tessera.tile.rewrites.split_kernel import PART, Cut, Split, split_kernel
from tessera.tile.rewrites.split_reduction import split_reduction
from tessera.tile.schedules.schedule import after_sums


def split(kernel: KernelOp, parts: int) -> Split:
    """A kernel's sequential axis, or else its reduction, in parts."""
    return (split_reduction if kernel.sequential_axis is None else split_sequential)(kernel, parts)


def split_sequential(kernel: KernelOp, parts: int) -> Split:
    sequential = kernel.sequential_axis
    assert sequential is not None, f"{kernel.sym_name.data} has no sequential axis"
    ends, later = tuple(kernel.sums_along(sequential)), after_sums(kernel)
    first = set(kernel.block.ops) - set(later)
    second = needed_for(kernel, later, given=ends)
    # Rows in turn, so that programs that run together read what lies together.
    part, whole = (kernel.axis(sequential).size.expr + (parts - 1)) // parts, name(sequential) * parts + name(PART)
    return split_kernel(kernel, Cut(sequential, part, whole, ends, first, second), parts)
