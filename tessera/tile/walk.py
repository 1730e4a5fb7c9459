"""A walk shared by many programs: a kernel becomes two, without atomic additions, so results repeat bit by bit.

    before:  y[i, r] = f(x[i, r], sum over r of x[i, r]);  z[r] = g(sum over i < n of x[i, r])
    -->
    first:   y as before, for the rows part, part + parts, part + 2 * parts, …
             scratch[part, r] = sum over those rows of x[i, r]
    second:  z[r] = g(sum over part of scratch[part, r])

It is for kernels that work row by row and sum over the rows as well: the gradients of norms.
"""

from __future__ import annotations

from tessera.tile.build import KernelBuilder
from tessera.tile.copying import Copy, needed_for, op_axes, place, points
from tessera.tile.dialect import PARALLEL, KernelOp, axes_of, element_of
from tessera.tile.index import Index, name
from tessera.tile.schedule import after_walk
from tessera.tile.split import PART, Scratch, Split


def share(kernel: KernelOp, parts: int) -> Split:
    walked = kernel.walked
    assert walked is not None, f"{kernel.sym_name.data} walks along no axis"
    sums = kernel.sums_along(walked)
    scratch = [Scratch(element_of(op.result), points(kernel, axes_of(op.result)) * parts) for op in sums]
    return Split(_first(kernel, walked, parts), _second(kernel, walked, parts), scratch)


def _first(kernel: KernelOp, walked: str, parts: int) -> KernelOp:
    k = KernelBuilder(f"{kernel.sym_name.data}_parts", [s.data for s in kernel.symbol_names])
    size = kernel.axis(walked).size.expr
    k.axis(PART, parts)
    for a in kernel.axes:
        mine = (size + (parts - 1)) // parts if a.axis.data == walked else a.size.expr
        k.axis(a.axis.data, mine, reduce=a.kind.data != PARALLEL)
    # Rows in turn, so that programs that run together read what lies together.
    whole = name(walked) * parts + name(PART)
    copy = _copy(kernel, k, {walked: whole})
    kept = {op: k.buffer(element_of(op.result)) for op in kernel.sums_along(walked)}
    exact = size.constant is not None and size.constant % parts == 0
    inside = None if exact else k.apply("lt", k.iota(whole), k.iota(size))
    later = set(after_walk(kernel))
    for op in kernel.block.ops:
        if op in kept:
            axes = axes_of(op.results[0])
            value = copy.reduction(op, inside)  # type: ignore[arg-type]
            k.store(value, kept[op], name(PART) * points(kernel, axes) + place(kernel, axes))  # type: ignore[index]
        elif op not in later:
            copy(op, inside if walked in op_axes(op) else None)
    return k.finish()


def _second(kernel: KernelOp, walked: str, parts: int) -> KernelOp:
    k = KernelBuilder(f"{kernel.sym_name.data}_whole", [s.data for s in kernel.symbol_names])
    for a in kernel.axes:
        if a.axis.data != walked:
            k.axis(a.axis.data, a.size.expr)
    k.axis(PART, parts, reduce=True)
    copy = _copy(kernel, k, {})
    kept = {op: k.buffer(element_of(op.result)) for op in kernel.sums_along(walked)}
    wanted = needed_for(kernel, after_walk(kernel), given=set(kept))
    for op in kernel.block.ops:
        if op in kept:
            axes = axes_of(op.results[0])
            part = k.load(kept[op], name(PART) * points(kernel, axes) + place(kernel, axes))  # type: ignore[index]
            copy.values[op.results[0]] = k.reduce("sum", part, PART)
        elif op in wanted:
            copy(op, None)
    return k.finish()


def _copy(kernel: KernelOp, k: KernelBuilder, places: dict[str, Index]) -> Copy:
    buffers = [k.buffer(element_of(b)) for b in kernel.buffers]
    return Copy(k, dict(zip(kernel.buffers, buffers, strict=True)), places)
