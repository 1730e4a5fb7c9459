"""One reduction shared by many programs: which kernels can be split so, and how.

    before:  y[j] = f(sum over r < n of x[r, j])
    -->
    first:   scratch[part, j] = sum over r < n / parts of x[part * (n / parts) + r, j]
    second:  y[j] = f(sum over part of scratch[part, j])

It is for reductions with few results and a long axis: columns, whole tensors, small products over a deep axis,
softmax sums, of which every part gives a maximum and a total, and variances, whose second sum needs the first. Where
something is stored along the axis once the reductions are known, as a softmax is, the second kernel does that for every
point, and joins the parts once a block.
"""

from __future__ import annotations

from xdsl.ir import Operation

from tessera.tile.dialect.index import Index, name
from tessera.tile.dialect.ops import ContractOp, KernelOp, LoadOp, ReduceExpOp, ReduceOp, ScanOp, StoreOp
from tessera.tile.rewrites.copying import Reduction, needed_for, op_axes
from tessera.tile.rewrites.online import with_reduce_exp
from tessera.tile.rewrites.split_kernel import PART, Cut, Split, split_kernel
from tessera.tile.rewrites.split_variance import variances
from tessera.tile.schedules.schedule import inner_axis, reduced_axis
from tessera.util.names import names

KINDS = names("sum prod max min any all")
ALIGNED = 16  # elements: wide loads of any type


def can_split(kernel: KernelOp) -> bool:
    """Whether the reductions can be combined from parts, and none waits for another but sums of squares for a mean."""
    return _cut(with_reduce_exp(kernel), 2) is not None


def ends_all(kernel: KernelOp) -> bool:
    """Whether it can be split, and nothing is left to do along the axis once the parts are joined."""
    cut = _cut(with_reduce_exp(kernel), 2)
    return cut is not None and not cut.again


def split_reduction(kernel: KernelOp, parts: int) -> Split:
    kernel = with_reduce_exp(kernel)
    cut = _cut(kernel, parts)
    assert cut is not None, f"{kernel.sym_name.data} cannot be split"
    return split_kernel(kernel, cut, parts)


def _cut(kernel: KernelOp, parts: int) -> Cut | None:
    axis = reduced_axis(kernel)
    if axis is None or kernel.sequential_axis or inner_axis(kernel):
        return None
    ends = tuple(op for op in kernel.block.ops if isinstance(op, (ReduceOp, ContractOp, ReduceExpOp)))
    if not ends or any(isinstance(op, ScanOp) for op in kernel.block.ops):
        return None
    later = _later(kernel, ends)
    late = {op: variance for op, variance in variances(kernel, axis).items() if op in later}
    waits = later & set(ends) - late.keys() or _later(kernel, tuple(late)) & set(ends)
    if waits or not all(op.kind.data in KINDS for op in ends if isinstance(op, ReduceOp)):
        return None
    stores = [op for op in kernel.block.ops if isinstance(op, StoreOp)]
    along = [op for op in stores if axis in op_axes(op)]
    again = any(op in later for op in along)
    if again and not _may_run_again(kernel):
        return None
    early = [] if again else along
    sums = [op for op in ends if op not in late]
    first = needed_for(kernel, [*sums, *early, *(variance.x.owner for variance in late.values())])  # type: ignore[list-item]
    results = [op for op in stores if op not in early]
    centres = [variance.centre.owner for variance in late.values()]
    second = needed_for(kernel, [*results, *centres], given=ends)  # type: ignore[list-item]
    part = _part(kernel.axis(axis).size.expr, parts)
    return Cut(axis, part, name(PART) * part + name(axis), ends, first, second, again, dict(late))


def _part(size: Index, parts: int) -> Index:
    """Positions of a part: those that leave no rest, or else so many that every part of an aligned row is aligned."""
    if size.constant is not None and size.constant % parts == 0:
        return size // parts
    return (size + (parts * ALIGNED - 1)) // (parts * ALIGNED) * ALIGNED


def _later(kernel: KernelOp, ends: tuple[Reduction, ...]) -> set[Operation]:
    """What waits for the reductions."""
    ready = {result for op in ends for result in op.results}
    later: set[Operation] = set()
    for op in kernel.block.ops:
        if ready & set(op.operands):
            later.add(op)
            ready.update(op.results)
    return later


def _may_run_again(kernel: KernelOp) -> bool:
    """Whether points along the axis may be programs of their own: none reads what another has written."""
    loaded = {op.buffer for op in kernel.block.ops if isinstance(op, LoadOp)}
    stores = [op for op in kernel.block.ops if isinstance(op, StoreOp)]
    return all(op.mode.data == "set" and op.buffer not in loaded for op in stores)
