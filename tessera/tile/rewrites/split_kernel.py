"""One kernel as two, with scratch memory between them and no atomic additions, so that results repeat bit by bit.

In: a kernel and a Cut: the axis that many programs share, the reductions along it, what runs before and what after
them. Out: a first kernel, whose programs each reduce one part and store what they found, and a second one, which joins
the parts and goes on. `split_reduction` cuts reductions, `split_sequential` cuts sums along a parallel axis. Of a sum
of squares about a mean a part gives three numbers, with which the squares can be taken about the mean of the whole:
see `split_variance`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from xdsl.ir import Attribute, Operation, SSAValue

from tessera.tile.dialect.build import KernelBuilder
from tessera.tile.dialect.index import Index, name
from tessera.tile.dialect.ops import REDUCE, KernelOp, ReduceExpOp, ReduceOp
from tessera.tile.dialect.types import axes_of, element_of
from tessera.tile.rewrites.copying import Copy, Reduction, op_axes, place, points
from tessera.tile.rewrites.split_variance import Middle, Parts, Variance, part_of, share_of

PART = "part"


@dataclass(frozen=True)
class Scratch:
    element: Attribute
    size: Index  # elements, all parts together


@dataclass(frozen=True)
class Split:
    first: KernelOp
    second: KernelOp
    scratch: list[Scratch]  # buffers of both kernels, after the original ones


@dataclass(frozen=True)
class Cut:
    axis: str
    part: Index  # positions of the axis that a part has
    whole: Index  # a position along the axis, by the part and the position inside of it
    ends: tuple[Reduction, ...]  # what every part gives
    first: set[Operation]  # what the first kernel runs, beside them
    second: set[Operation]
    again: bool = False  # the second kernel runs along the axis too, which is then a parallel one
    variances: dict[Operation, Variance] = field(default_factory=dict)  # of the ends, those that wait for another

    def kept(self, op: Reduction) -> list[SSAValue]:
        """Values of the whole kernel that look like what a part gives."""
        return [*op.results] * (3 if op in self.variances else 1)

    def parts(self, kernel: KernelOp, count: int) -> Parts:
        size = kernel.axis(self.axis).size.expr
        exact = size.constant is not None and self.part * count == size
        return Parts(self.axis, size, self.part, self.whole.substitute({self.axis: 0}), exact)


def split_kernel(kernel: KernelOp, cut: Cut, parts: int) -> Split:
    kept = [Scratch(element_of(v), points(kernel, axes_of(v)) * parts) for op in cut.ends for v in cut.kept(op)]
    return Split(_first(kernel, cut, parts), _second(kernel, cut, parts), kept)


def _first(kernel: KernelOp, cut: Cut, parts: int) -> KernelOp:
    k = KernelBuilder(f"{kernel.sym_name.data}_parts", [s.data for s in kernel.symbol_names])
    shares = cut.parts(kernel, parts)
    k.axis(PART, parts)
    for a in kernel.axes:
        mine = cut.part if a.axis.data == cut.axis else a.size.expr
        k.axis(a.axis.data, mine, reduce=a.kind.data == REDUCE)
    copy, kept = _start(kernel, k, cut, {cut.axis: cut.whole})
    inside = None if shares.exact else k.apply("lt", k.iota(cut.whole), k.iota(shares.size))
    centred = {variance.x for variance in cut.variances.values()}
    middles: dict[SSAValue, Middle] = {}
    for op in kernel.block.ops:
        if op in kept:
            results = _known(op, cut, middles) or copy.reduction(op, inside)  # type: ignore[arg-type]
            for value, (buffer, at) in zip(results, kept[op], strict=True):
                k.store(value, buffer, at)
        elif op in cut.first:
            copy(op, inside if cut.axis in op_axes(op) else None)
            middles |= {v: part_of(kernel, v, copy, shares, inside) for v in op.results if v in centred}
    return k.finish()


def _known(op: Operation, cut: Cut, middles: dict[SSAValue, Middle]) -> list[SSAValue]:
    """What a part gives of a sum of squares, or of the plain sum beside it; nothing of other reductions."""
    if op in cut.variances:
        middle = middles[cut.variances[op].x]
        return [middle.left, middle.first, middle.off]
    if isinstance(op, ReduceOp) and op.kind.data == "sum" and op.arg in middles:
        return [middles[op.arg].total]
    return []


def _second(kernel: KernelOp, cut: Cut, parts: int) -> KernelOp:
    k = KernelBuilder(f"{kernel.sym_name.data}_whole", [s.data for s in kernel.symbol_names])
    for a in kernel.axes:
        if a.axis.data != cut.axis or cut.again:
            k.axis(a.axis.data, a.size.expr)
    k.axis(PART, parts, reduce=True)
    copy, kept = _start(kernel, k, cut, {})
    for op in kernel.block.ops:
        if op in kept:
            loaded = [k.load(buffer, at) for buffer, at in kept[op]]
            if op in cut.variances:
                left, first, off = loaded
                centre = copy.values[cut.variances[op].centre]
                loaded = [share_of(k, first, off, left, centre, cut.parts(kernel, parts))]
            copy.values.update(zip(op.results, _joined(k, op, loaded), strict=True))  # type: ignore[arg-type]
        elif op in cut.second:
            copy(op, None)
    return k.finish()


Kept = dict[Operation, list[tuple[SSAValue, Index]]]  # the buffers of a reduction's results, and where a part's are


def _start(kernel: KernelOp, k: KernelBuilder, cut: Cut, places: dict[str, Index]) -> tuple[Copy, Kept]:
    """Buffers of the original kernel, then the scratch memory."""
    buffers = {b: k.buffer(element_of(b)) for b in kernel.buffers}
    kept: Kept = {}
    for op in cut.ends:
        axes = axes_of(op.results[0])
        at = name(PART) * points(kernel, axes) + place(kernel, axes)
        kept[op] = [(k.buffer(element_of(v)), at) for v in cut.kept(op)]
    return Copy(k, buffers, places), kept


def _joined(k: KernelBuilder, op: Reduction, parts: list[SSAValue]) -> Iterator[SSAValue]:
    """The results of a reduction from those of its parts."""
    if not isinstance(op, ReduceExpOp):
        yield k.reduce(op.kind.data if isinstance(op, ReduceOp) else "sum", parts[0], PART)
        return
    # A part without a finite element has a total of zero, which an exponential of -inf leaves so.
    tops, totals = parts
    top = base = k.reduce("max", tops, PART)
    if op.infinite.data == "zero":
        base = k.apply("select", k.apply("isinf", top), k.constant(0.0, element_of(top)), top)
    share = k.apply(op.fn.data, k.apply("sub", tops, base))
    yield top
    yield k.reduce("sum", k.apply("mul", totals, share), PART)
