"""Group norms written out as arithmetic and reductions, in the layout in which their input lies.

As in `decompose_nn`, a rule gets the equation and its arguments bound to the schema. PyTorch's own operators take and
give row-major images, so equations are written out here for those alone; `passes/patterns/channels_last` writes out
norms over images whose channels lie side by side. PyTorch's formula of the gradient, which `decompose` knows, adds up
products of numbers that are not centred; the one here does not.
"""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.types import Size
from tessera.ops.families import product
from tessera.passes.decompose.nn import Results, affine, channels, out, rule, wide


def _groups(x: Value, groups: int) -> tuple[Value, list[int]]:
    """[N, C, …] as [N, groups, all of a group], or with its dimensions apart where they do not lie in their order; and
    the dimensions of a group. Said in numbers, for there may be no element to count."""
    members = [x.shape[1] // groups, *x.shape[2:]]
    members = [product(members)] if x.tensor.is_row_major else members
    return aten.view(x, [x.shape[0], groups, *members]), list(range(2, 2 + len(members)))


def normalised(x: Value, w: Value | None, b: Value | None, groups: int, eps: float) -> tuple[Value, Value, Value]:
    """What a group norm gives before it is rounded; mean and 1 / deviation of every group."""
    rows, dims = _groups(wide(x), groups)
    variance, mean = aten.var_mean(rows, dims, correction=0, keepdim=True)
    rstd = aten.rsqrt(aten.add(variance, eps))
    y = aten.view(aten.mul(aten.sub(rows, mean), rstd), list(x.shape))
    flat = [x.shape[0], groups]
    return affine(y, channels(w, x), channels(b, x)), aten.view(mean, flat), aten.view(rstd, flat)


def gradients(g: Value, x: Value, mean: Value, rstd: Value, w: Value | None, groups: int) -> tuple[Value, Value, Value]:
    """Of input, weight and bias, from that of the result, all of them wide. Sums over pixels are taken once, by
    channel; what is summed over a group is made of them. Casts come last: every kernel that reads one has its own."""
    n, width, pixels = x.shape[0], x.shape[1] // groups, list(x.shape[2:])
    ones = [1] * len(pixels)

    def grouped(v: Value) -> Value:
        return wide(aten.view(v, [n, groups, width, *pixels]))

    def by_group(v: Value) -> Value:
        return wide(aten.view(v, [n, groups, 1, *ones]))

    g, rstd = grouped(g), by_group(rstd)
    unit = aten.mul(aten.sub(grouped(x), by_group(mean)), rstd)
    spatial = list(range(3, 3 + len(pixels)))
    along, total = (aten.sum(v, spatial, True) if spatial else v for v in (aten.mul(g, unit), g))
    factor = None if w is None else wide(aten.view(w, [1, groups, width, *ones]))

    def mean_of(v: Value) -> Value:
        weighted = v if factor is None else aten.mul(v, factor)
        return aten.div(aten.sum(weighted, [2], True), product([width, *pixels]))

    left = aten.sub(g if factor is None else aten.mul(g, factor), mean_of(total))
    dx = aten.mul(aten.sub(left, aten.mul(unit, mean_of(along))), rstd)
    dw, db = (aten.view(aten.sum(v, [0]), [x.shape[1]]) for v in (along, total))
    return aten.view(dx, list(x.shape)), dw, db


@rule("native_group_norm")
def native_group_norm(
    eqn: Equation, x: Value, w: Value | None, b: Value | None, n: Size, c: Size, hw: Size, groups: int, eps: float
) -> Results:
    if not x.tensor.is_float or x.ndim < 2 or not x.tensor.is_row_major:
        return None
    return [out(eqn, k, v) for k, v in enumerate(normalised(x, w, b, groups, eps))]


@rule("group_norm")
def group_norm(
    eqn: Equation, x: Value, groups: int, w: Value | None, b: Value | None, eps: float, *_: object
) -> Results:
    if x.ndim < 2 or not x.tensor.is_row_major:
        return None
    return [out(eqn, 0, normalised(x, w, b, groups, eps)[0])]
