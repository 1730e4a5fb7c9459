"""Views and movement of data: reshapes, transposes, slices, pieces, joins, copies, constructors.

All of them are linear, so a tangent takes the operator itself and a cotangent its transpose; the rules hold
for complex numbers too. Composite operators that say what a program means better than their parts do
(`reshape`, `flatten`, `chunk`, …) are declared, hence kept whole. Sizes are handed on, never compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Value
from tessera.ir.types import Size
from tessera.ops.families import call, carry, is_number, is_one, linear, or_zeros, pad_rank, shifted, sum_to, view, wrap
from tessera.ops.op import declare

# --- reshapes -------------------------------------------------------------------------------------


def _reshape_back(ct: Value, x: Value, *params: Arg) -> Value:
    return aten.reshape(ct, list(x.shape))


def _reshape_batch(size: Size, on: Sequence[bool], x: Value, shape: Sequence[Size]) -> Value:
    return aten.reshape(x, [size, *shape])


def _flatten_batch(size: Size, on: Sequence[bool], x: Value, start: int, end: int) -> Value:
    if x.ndim == 1:
        return aten.unsqueeze(x, 1)
    return aten.flatten(x, shifted(start, x), shifted(end, x))


def _move_batch(size: Size, on: Sequence[bool], x: Value, source: Arg, to: Arg) -> Value:
    if isinstance(source, int):
        source, to = [source], [to]
    return aten.movedim(x, [shifted(d, x) for d in source], [shifted(d, x) for d in to])  # type: ignore[union-attr]


view("aten.view.default", _reshape_back, _reshape_batch)
view("aten.reshape", _reshape_back, _reshape_batch)
view("aten._unsafe_view", _reshape_back, _reshape_batch)
view("aten.flatten.using_ints", _reshape_back, _flatten_batch)
view("aten.unflatten.int", _reshape_back, lambda size, on, x, dim, sizes: aten.unflatten(x, shifted(dim, x), sizes))

# --- dimensions: order, ones, repetition ----------------------------------------------------------


def _permute_back(ct: Value, x: Value, dims: Sequence[int]) -> Value:
    inverse = [0] * len(dims)
    for to, source in enumerate(dims):
        inverse[wrap(source, x.ndim)] = to
    return aten.permute(ct, inverse)


def _transpose_batch(size: Size, on: Sequence[bool], x: Value, a: int, b: int) -> Value:
    return x if x.ndim == 1 else aten.transpose(x, shifted(a, x), shifted(b, x))


def _squeezed(x: Value, dims: Sequence[int]) -> list[int]:
    """Those of the logical dimensions of a batched `x` that a squeeze takes away."""
    return [d for d in sorted(shifted(d, x) for d in dims) if is_one(x.shape[d])] if x.ndim > 1 else []


def _squeeze_batch(size: Size, on: Sequence[bool], x: Value, dims: Arg = None) -> Value:
    listed = range(x.ndim - 1) if dims is None else [dims] if isinstance(dims, int) else dims
    taken = _squeezed(x, listed)  # type: ignore[arg-type]
    return aten.squeeze(x, taken) if taken else aten.alias(x)


def _squeeze_back(ct: Value, x: Value, *params: Arg) -> Value:
    """Where the sizes tell which dimensions went, put them back one by one; else reshape."""
    listed = range(x.ndim) if not params else [params[0]] if isinstance(params[0], int) else params[0]
    gone = sorted({d for d in (wrap(d, x.ndim) for d in listed) if x.ndim and is_one(x.shape[d])})  # type: ignore[union-attr]
    if ct.ndim + len(gone) != x.ndim:
        return aten.reshape(ct, list(x.shape))
    for d in gone:
        ct = aten.unsqueeze(ct, d)
    return ct


def _expand_batch(size: Size, on: Sequence[bool], x: Value, sizes: Sequence[Size], implicit: bool) -> Value:
    return aten.expand(pad_rank(x, len(sizes) + 1), [size, *sizes])


def _repeat_back(ct: Value, x: Value, repeats: Sequence[Size]) -> Value:
    """Split every repeated dimension into (copies, size) and sum over the copies."""
    shape: list[Size] = []
    copies: list[int] = []
    lead = len(repeats) - x.ndim
    for i, count in enumerate(repeats):
        if not is_number(count, 1) or i < lead:
            copies.append(len(shape))
            shape.append(count)
        if i >= lead:
            shape.append(x.shape[i - lead])
    return aten.sum(aten.reshape(ct, shape), copies) if copies else ct


def _roll_batch(size: Size, on: Sequence[bool], x: Value, shifts: Sequence[Size], dims: Sequence[int]) -> Value:
    if x.ndim == 1:
        return aten.alias(x)
    if not dims:
        return aten.reshape(aten.roll(aten.flatten(x, 1), shifts, [1]), list(x.shape))
    return aten.roll(x, shifts, [shifted(d, x) for d in dims])


view("aten.transpose.int", lambda ct, x, a, b: aten.transpose(ct, a, b), _transpose_batch)
view("aten.t", lambda ct, x: aten.t(ct), lambda size, on, x: aten.transpose(x, 1, 2) if x.ndim == 3 else aten.alias(x))
view("aten.permute", _permute_back, lambda size, on, x, dims: aten.permute(x, [0, *(shifted(d, x) for d in dims)]))
view("aten.movedim.int", lambda ct, x, source, to: aten.movedim(ct, to, source), _move_batch)
view("aten.movedim.intlist", lambda ct, x, source, to: aten.movedim(ct, to, source), _move_batch)
view(
    "aten.unsqueeze",
    lambda ct, x, dim: aten.squeeze(ct, dim),
    lambda size, on, x, dim: aten.unsqueeze(x, dim % x.ndim + 1),
)
for _name in ("squeeze.default", "squeeze.dim", "squeeze.dims"):
    view(f"aten.{_name}", _squeeze_back, _squeeze_batch)
view("aten.expand", lambda ct, x, sizes, implicit: sum_to(ct, x), _expand_batch)
linear(
    "aten.repeat", _repeat_back, lambda size, on, x, repeats: aten.repeat(pad_rank(x, len(repeats) + 1), [1, *repeats])
)
linear(
    "aten.flip",
    lambda ct, x, dims: aten.flip(ct, dims),
    lambda size, on, x, dims: aten.flip(x, [shifted(d, x) for d in dims] if x.ndim > 1 else []),
)
linear("aten.roll", lambda ct, x, shifts, dims: aten.roll(ct, [-s for s in shifts], dims), _roll_batch)
linear("aten.tril", lambda ct, x, k: aten.tril(ct, k), lambda size, on, x, k: aten.tril(x, k))
linear("aten.triu", lambda ct, x, k: aten.triu(ct, k), lambda size, on, x, k: aten.triu(x, k))

# --- parts ----------------------------------------------------------------------------------------

_END = sys.maxsize


def _slice_back(ct: Value, x: Value, dim: int, start: Arg, end: Arg, step: Arg) -> Value:
    low, high = 0 if start is None else start, _END if end is None else end
    if is_number(low, 0) and is_number(high, _END) and is_number(step, 1):
        return ct
    return aten.slice_backward(ct, list(x.shape), dim, low, high, step)


def _narrow_back(ct: Value, x: Value, dim: int, start: int, length: Size) -> Value:
    low = start if start >= 0 else start + x.shape[dim]
    return aten.slice_backward(ct, list(x.shape), dim, low, low + length, 1)


def _pair(dim1: int, dim2: int, rank: int) -> tuple[int, int]:
    """Two logical dimensions of something of that logical rank, moved past the batch."""
    return wrap(dim1, rank) + 1, wrap(dim2, rank) + 1


view("aten.slice.Tensor", _slice_back, lambda size, on, x, dim, *rest: aten.slice(x, shifted(dim, x), *rest))
view(
    "aten.select.int",
    lambda ct, x, dim, index: aten.select_backward(ct, list(x.shape), dim, index),
    lambda size, on, x, dim, index: aten.select(x, shifted(dim, x), index),
)
view(
    "aten.narrow.default",
    _narrow_back,
    lambda size, on, x, dim, start, length: aten.narrow(x, shifted(dim, x), start, length),
    applies=lambda eqn: type(eqn.args[2]) is int,  # a symbolic start may be negative
)
view(
    "aten.diagonal.default",
    lambda ct, x, k, a, b: aten.diagonal_backward(ct, list(x.shape), k, a, b),
    lambda size, on, x, k, a, b: aten.diagonal(x, k, *_pair(a, b, x.ndim - 1)),
)
view(
    "aten.unfold",
    lambda ct, x, dim, size, step: aten.unfold_backward(ct, list(x.shape), dim, size, step),
    lambda n, on, x, dim, size, step: (
        aten.unfold(x, shifted(dim, x), size, step)
        if x.ndim > 1
        else aten.squeeze(aten.unfold(aten.unsqueeze(x, 1), 1, size, step), 1)
    ),
    applies=lambda eqn: eqn.args[0].ndim > 0,  # type: ignore[attr-defined]
)
linear(
    "aten.diag_embed",
    lambda ct, x, k, a, b: aten.diagonal(ct, k, a, b),
    lambda size, on, x, k, a, b: aten.diag_embed(x, k, *_pair(a, b, x.ndim)),
)
linear(
    "aten.slice_backward",
    lambda ct, g, sizes, dim, start, end, step: aten.slice(ct, dim, start, end, step),
    lambda size, on, g, sizes, dim, *rest: aten.slice_backward(g, [size, *sizes], shifted(dim, g), *rest),
)
linear(
    "aten.select_backward",
    lambda ct, g, sizes, dim, index: aten.select(ct, dim, index),
    lambda size, on, g, sizes, dim, index: aten.select_backward(g, [size, *sizes], wrap(dim, len(sizes)) + 1, index),
)
linear(
    "aten.diagonal_backward",
    lambda ct, g, sizes, k, a, b: aten.diagonal(ct, k, a, b),
    lambda size, on, g, sizes, k, a, b: aten.diagonal_backward(g, [size, *sizes], k, *_pair(a, b, len(sizes))),
)

# --- pieces: several results ----------------------------------------------------------------------


def _pieces_back(cts: Sequence[Value | None], y: Sequence[Value], x: Value, dim: int) -> Value:
    """Pieces put back beside each other; a single one is put into zeros."""
    there = [ct for ct in cts if ct is not None]
    if len(there) == 1 and len(cts) > 1:
        index = next(i for i, ct in enumerate(cts) if ct is not None)
        start: Size = 0
        for piece in y[:index]:
            start = start + piece.shape[dim]
        return aten.slice_backward(there[0], list(x.shape), dim, start, start + y[index].shape[dim], 1)
    filled = [aten.new_zeros(there[0], list(p.shape)) if ct is None else ct for ct, p in zip(cts, y, strict=True)]
    return aten.cat(filled, dim)


def _pieces(name: str, free: bool = True) -> None:
    """(x, how, dim) -> pieces of x along a dimension."""

    def vjp(cts: Sequence[Value | None], y: Sequence[Value], x: Value, how: Arg, dim: int) -> tuple:
        return (lambda: _pieces_back(cts, y, x, dim),)

    again = call(name)
    declare(
        name,
        "view" if free else "shape",
        vjp=vjp,
        jvp=lambda ts, y, x, how, dim: again(ts[0], how, dim),
        batch=lambda size, on, x, how, dim: again(x, how, shifted(dim, x)),
        real=False,
        free=free,
    )


_pieces("aten.split.Tensor")
_pieces("aten.split_with_sizes.default")
_pieces("aten.chunk.default")
_pieces("aten.unsafe_split.Tensor", free=False)
_pieces("aten.unsafe_split_with_sizes.default", free=False)


def _unbind_vjp(cts: Sequence[Value | None], y: Sequence[Value], x: Value, dim: int) -> tuple:
    def grad() -> Value:
        there = [ct for ct in cts if ct is not None]
        if len(there) == 1 and len(cts) > 1:
            index = next(i for i, ct in enumerate(cts) if ct is not None)
            return aten.select_backward(there[0], list(x.shape), dim, index)
        filled = [aten.zeros_like(p) if ct is None else ct for ct, p in zip(cts, y, strict=True)]
        return aten.stack(filled, dim)

    return (grad,)


declare(
    "aten.unbind.int",
    "view",
    vjp=_unbind_vjp,
    jvp=lambda ts, y, x, dim: aten.unbind(ts[0], dim),
    batch=lambda size, on, x, dim: aten.unbind(x, shifted(dim, x)),
    real=False,
    free=True,
)

# --- joins ----------------------------------------------------------------------------------------


def tangents(ts: Arg, xs: Sequence[Value]) -> list[Value]:
    """A tangent for each tensor of a list, zeros where one does not move."""
    return [or_zeros(t, x) for t, x in zip(ts or [None] * len(xs), xs, strict=True)]  # type: ignore[arg-type]


def carried(size: Size, on: Arg, xs: Sequence[Value]) -> list[Value]:
    """Every tensor of a list with the batch in front."""
    flags = on if isinstance(on, (list, tuple)) else [on] * len(xs)
    return [carry(x, bool(flag), size) for x, flag in zip(xs, flags, strict=True)]


def _left_out(x: Value, rank: int) -> bool:
    """PyTorch's cat takes empty vectors among tensors of any rank and ignores them."""
    return x.ndim == 1 and rank != 1 and is_number(x.shape[0], 0)


def _cat_vjp(ct: Value, y: Value, xs: Sequence[Value], dim: int) -> tuple:
    def part(x: Value, start: Size) -> Callable[[], Value]:
        if _left_out(x, y.ndim):
            return lambda: aten.new_zeros(ct, [0])
        return lambda: aten.slice(ct, dim, start, start + x.shape[dim])

    grads: list[Callable[[], Value]] = []
    start: Size = 0
    for x in xs:
        grads.append(part(x, start))
        if not _left_out(x, y.ndim):
            start = start + x.shape[dim]
    return (grads,)


def _cat_batch(size: Size, on: Sequence[object], xs: Sequence[Value], dim: int) -> Value:
    items = carried(size, on[0], xs)
    rank = max(x.ndim for x in items)
    kept = [x for x in items if x.ndim == rank or not is_number(x.shape[1], 0)]
    return aten.cat(kept, wrap(dim, rank - 1) + 1)


def _stack_batch(size: Size, on: Sequence[object], xs: Sequence[Value], dim: int) -> Value:
    items = carried(size, on[0], xs)
    return aten.stack(items, wrap(dim, items[0].ndim) + 1)


declare(
    "aten.cat",
    "shape",
    vjp=_cat_vjp,
    jvp=lambda ts, y, xs, dim: aten.cat(tangents(ts[0], xs), dim),
    batch=_cat_batch,
    real=False,
)
declare(
    "aten.stack",
    "shape",
    vjp=lambda ct, y, xs, dim: ([lambda i=i: aten.select(ct, dim, i) for i in range(len(xs))],),
    jvp=lambda ts, y, xs, dim: aten.stack(tangents(ts[0], xs), dim),
    batch=_stack_batch,
    real=False,
)

# --- writing a part -------------------------------------------------------------------------------


def _writes_part(name: str, read: Callable, move: Callable) -> None:
    """(x, part, …) -> x with a part replaced; `read(x, …)` gives that part, `move` shifts the arguments."""

    def vjp(ct: Value, y: Value, x: Value, part: Value, *params: Arg) -> tuple:
        return (
            lambda: again(ct, aten.new_zeros(ct, list(part.shape)), *params),
            lambda: sum_to(read(ct, *params), part),
        )

    def jvp(ts: Sequence[Value | None], y: Value, x: Value, part: Value, *params: Arg) -> Value:
        return again(or_zeros(ts[0], x), or_zeros(ts[1], part), *params)

    def batch(size: Size, on: Sequence[bool], x: Value, part: Value, *params: Arg) -> Value:
        return again(carry(x, on[0], size), carry(part, on[1], size), *move(x.ndim - on[0], *params))

    again = call(name)
    declare(name, "shape", vjp=vjp, jvp=jvp, batch=batch, real=False)


_writes_part("aten.slice_scatter.default", aten.slice, lambda rank, dim, *rest: (wrap(dim, rank) + 1, *rest))
_writes_part("aten.select_scatter.default", aten.select, lambda rank, dim, index: (wrap(dim, rank) + 1, index))
_writes_part("aten.diagonal_scatter.default", aten.diagonal, lambda rank, k, a, b: (k, *_pair(a, b, rank)))
declare(
    "aten.constant_pad_nd",
    "shape",
    vjp=lambda ct, y, x, pad, value: (lambda: aten.constant_pad_nd(ct, [-p for p in pad]),),
    jvp=lambda ts, y, x, pad, value: aten.constant_pad_nd(ts[0], pad),
    batch=lambda size, on, x, pad, value: aten.constant_pad_nd(x, pad, value),
    real=False,
)
