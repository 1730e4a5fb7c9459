"""Lowerings of operators that choose where to read: concatenations, scatters of slices, gathers by integer tensors,
and tensors made from nothing.

A choice reads every side under its own condition, so that no side is loaded outside its bounds. An index beyond the
bounds of a gather reads nothing: the result is NaN there (0 for integers), where PyTorch raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tessera.ir.equation import Arg, Value
from tessera.ir.types import Size
from tessera.tile.from_trace.index import ONE, ZERO, Index, Indices, Unlowerable, size_index
from tessera.tile.from_trace.lower.rule import SELECT, SOURCE, Call, Reader, Rule, define, wrap
from tessera.tile.from_trace.lower.view import _index, from_start, shape_of, start_of
from tessera.tile.from_trace.values import T
from tessera.torch_internals.operators import overload_name

# --- joining and padding --------------------------------------------------------------------------------


def _set(at: Indices, dim: int, i: Index) -> Indices:
    return (*at[:dim], i, *at[dim + 1 :])


def _less(reader: Reader, i: Index, bound: Index) -> T:
    """i < bound, with the constant on one side so that equal conditions are equal values."""
    return reader.emit.iota(i) < (reader.emit.iota(bound) if bound.constant is None else bound.constant)


def _cat(reader: Reader, call: Call, at: Indices) -> T:
    parts = [v for v in call.args[0] if isinstance(v, Value)]  # type: ignore[union-attr]
    parts = [v for v in parts if not (v.ndim == 1 and v.shape[0] == 0 and call.out.ndim != 1)]
    dim = wrap(call.args[1], call.out.ndim)  # type: ignore[arg-type]
    sizes = [shape_of(v)[dim] for v in parts]
    return _pieces(reader, call, at, dim, sizes, lambda r, k, i: r.read(parts[k], _set(at, dim, i)))


def _stack(reader: Reader, call: Call, at: Indices) -> T:
    parts = [v for v in call.args[0] if isinstance(v, Value)]  # type: ignore[union-attr]
    dim = wrap(call.args[1], call.out.ndim)  # type: ignore[arg-type]
    rest = (*at[:dim], *at[dim + 1 :])
    return _pieces(reader, call, at, dim, [ONE] * len(parts), lambda r, k, i: r.read(parts[k], rest))


def _pieces(reader: Reader, call: Call, at: Indices, dim: int, sizes: Sequence[Index], read) -> T:  # noqa: ANN001
    """Piece k where the index along `dim` lies in its part, chosen by one comparison after another."""
    starts = [sum(sizes[:k], ZERO) for k in range(len(sizes))]
    i = at[dim]
    chosen: T | None = None
    for k in reversed(range(len(sizes))):
        if sizes[k] == ZERO:
            continue
        if reader.ranges.within(i - starts[k], sizes[k]):  # all of the kernel lies in this piece
            return read(reader, k, i - starts[k]).to(call.out.dtype)
        inner = reader
        if k + 1 < len(sizes):
            inner = inner.under(_less(reader, i, starts[k] + sizes[k]))
        if k:
            inner = inner.under(~_less(reader, i, starts[k]))
        x = read(inner, k, i - starts[k]).to(call.out.dtype)
        chosen = x if chosen is None else _less(reader, i, starts[k] + sizes[k]).where(x, chosen)
    assert chosen is not None
    return chosen


def _pad(reader: Reader, call: Call, at: Indices) -> T:
    _, pads, value = call.args[:3]
    shape = shape_of(call.first)
    inside: T | None = None
    index = list(at)
    for k in range(len(pads) // 2):  # type: ignore[arg-type]
        d = len(at) - 1 - k
        before, after = _index(pads[2 * k]), _index(pads[2 * k + 1])  # type: ignore[index]
        index[d] = at[d] - before
        if before != ZERO:
            test = ~_less(reader, at[d], before)
            inside = test if inside is None else inside & test
        if after != ZERO:
            test = _less(reader, at[d], before + shape[d])
            inside = test if inside is None else inside & test
    if inside is None:
        return reader.read(call.first, tuple(index))
    x = reader.under(inside).read(call.first, tuple(index))
    return inside.where(x, x.like(value))  # type: ignore[arg-type]


define("cat concat", Rule(SELECT, _cat))
define("stack", Rule(SELECT, _stack))
define("constant_pad_nd", Rule(SELECT, _pad))

# --- a part written over --------------------------------------------------------------------------------


def _in_slice(reader: Reader, i: Index, size: Size, start: Arg, end: Arg, step: Arg) -> tuple[T | None, Index]:
    """Whether an index lies in a slice, and which of its elements it is."""
    first, last, stride = start_of(start, size), _end(end, size), _index(step)
    test: T | None = None
    if first != ZERO:
        test = ~_less(reader, i, first)
    if last != size_index(size):
        below = _less(reader, i, last)
        test = below if test is None else test & below
    if stride != ONE:
        on = reader.emit.iota(reader.ranges.mod(i - first, stride)).eq(0)
        test = on if test is None else test & on
    return test, reader.ranges.div(i - first, stride)


def _end(x: Arg, size: Size) -> Index:
    """Where a slice ends. No index is beyond the size, so an end there or before the beginning needs no care."""
    if x is None or (isinstance(x, int) and x >= (size if isinstance(size, int) else 2**62)):
        return size_index(size)
    return from_start(x, size)


def _slice_scatter(reader: Reader, call: Call, at: Indices) -> T:
    source, dim, start, end, step = call.args[1:6]
    dim = wrap(dim, call.first.ndim)  # type: ignore[arg-type]
    test, i = _in_slice(reader, at[dim], call.first.shape[dim], start, end, step)
    if test is None:
        return reader.read(source, at).to(call.out.dtype)
    new = reader.under(test).read(source, _set(at, dim, i)).to(call.out.dtype)
    return test.where(new, reader.read(call.first, at))


def _slice_backward(reader: Reader, call: Call, at: Indices) -> T:
    _, sizes, dim, start, end, step = call.args[:6]
    dim = wrap(dim, len(sizes))  # type: ignore[arg-type]
    test, i = _in_slice(reader, at[dim], call.out.shape[dim], start, end, step)
    if test is None:
        return reader.read(call.first, at)
    return test.where(reader.under(test).read(call.first, _set(at, dim, i)), 0)


def _at_place(reader: Reader, call: Call, at: Indices, dim: int, index: Arg) -> tuple[T, Indices]:
    place = from_start(index, call.out.shape[dim])
    bound = reader.emit.iota(place) if place.constant is None else place.constant
    return reader.emit.iota(at[dim]).eq(bound), (*at[:dim], *at[dim + 1 :])


def _select_scatter(reader: Reader, call: Call, at: Indices) -> T:
    source, dim, index = call.args[1:4]
    test, rest = _at_place(reader, call, at, wrap(dim, call.first.ndim), index)  # type: ignore[arg-type]
    new = reader.under(test).read(source, rest).to(call.out.dtype)
    return test.where(new, reader.read(call.first, at))


def _select_backward(reader: Reader, call: Call, at: Indices) -> T:
    _, _, dim, index = call.args[:4]
    test, rest = _at_place(reader, call, at, wrap(dim, call.out.ndim), index)  # type: ignore[arg-type]
    return test.where(reader.under(test).read(call.first, rest), 0)


define("slice_scatter", Rule(SELECT, _slice_scatter))
define("slice_backward", Rule(SELECT, _slice_backward))
define("select_scatter", Rule(SELECT, _select_scatter))
define("select_backward", Rule(SELECT, _select_backward))

# --- gathers ----------------------------------------------------------------------------------------------


def _at_gathered(reader: Reader, source: Value, picks: dict[int, T], at: Indices, wraps: bool) -> T:
    """`source` at an index some of whose entries are integer values."""
    index, inside = list(at), None
    for dim, pick in picks.items():
        size = shape_of(source)[dim]
        bound = reader.emit.iota(size) if size.constant is None else reader.emit.constant(size.constant, torch.int64)
        pick = pick.to(torch.int64)
        if wraps:
            pick = (pick < 0).where(pick + bound, pick)
        test = (pick >= 0) & (pick < bound)
        inside = test if inside is None else inside & test
        index[dim] = reader.emit.gather(pick)
    assert inside is not None
    x = reader.under(inside).read(source, tuple(index))
    return inside.where(x, x.like(math.nan if x.dtype.is_floating_point else 0))


def _embedding(reader: Reader, call: Call, at: Indices) -> T:
    pick = reader.read(call.args[1], at[:-1])
    return _at_gathered(reader, call.first, {0: pick}, (ZERO, at[-1]), wraps=False)


def _index_select(reader: Reader, call: Call, at: Indices) -> T:
    if not call.first.ndim:
        return reader.read(call.first, at)
    dim = wrap(call.args[1], call.first.ndim)  # type: ignore[arg-type]
    which = call.args[2]
    pick = reader.read(which, (at[dim],) if which.ndim else ())  # type: ignore[union-attr]
    return _at_gathered(reader, call.first, {dim: pick}, at, wraps=False)


def _gather(reader: Reader, call: Call, at: Indices) -> T:
    if not call.first.ndim:
        return reader.read(call.first, at)
    dim = wrap(call.args[1], call.first.ndim)  # type: ignore[arg-type]
    return _at_gathered(reader, call.first, {dim: reader.read(call.args[2], at)}, at, wraps=False)


def _advanced(reader: Reader, call: Call, at: Indices) -> T:
    """x[:, i, j]: integer tensors in neighbouring dimensions, which broadcast together."""
    listed = list(call.args[1])  # type: ignore[call-overload]
    tensors = [(d, v) for d, v in enumerate(listed) if v is not None]
    if any(v.dtype in (torch.bool, torch.uint8) for _, v in tensors):
        raise Unlowerable("indexing by a mask gives as many elements as the mask has")
    dims = [d for d, _ in tensors]
    if dims != list(range(dims[0], dims[0] + len(dims))):
        raise Unlowerable("indexing by tensors in dimensions that are not neighbours")
    rank = max(v.ndim for _, v in tensors)
    head, inner, tail = at[: dims[0]], at[dims[0] : dims[0] + rank], at[dims[0] + rank :]
    picks = {}
    for d, v in tensors:
        own = inner[rank - v.ndim :]
        picks[d] = reader.read(v, tuple(ZERO if n == ONE else i for i, n in zip(own, shape_of(v), strict=True)))
    return _at_gathered(reader, call.first, picks, (*head, *[ZERO] * len(dims), *tail), wraps=True)


def _checked(call: Call) -> str:
    return "PyTorch checks its indices, and a kernel cannot raise"


define("embedding", Rule(SELECT, _embedding, raises=_checked))
define("index_select", Rule(SELECT, _index_select, raises=_checked))
define("gather", Rule(SELECT, _gather, raises=_checked))
define("index.Tensor _unsafe_index", Rule(SELECT, _advanced, raises=_checked))

# --- tensors made from nothing ----------------------------------------------------------------------------


def _constant(where: int | float) -> Rule:
    """`where`: the number itself for zeros and ones."""
    return Rule(SOURCE, lambda reader, call, at: reader.emit.constant(where, call.out.dtype))


def _filled(position: int) -> Rule:
    def lower(reader: Reader, call: Call, at: Indices) -> T:
        value = call.args[position]
        if isinstance(value, Value):
            return reader.read(value, ()).to(call.out.dtype)
        if not isinstance(value, (bool, int, float)):
            raise Unlowerable(f"a tensor filled with {value}")
        return reader.emit.constant(value, call.out.dtype)

    return Rule(SOURCE, lower)


define("zeros zeros_like new_zeros", _constant(0))
define("ones ones_like new_ones", _constant(1))
define("full full_like fill", _filled(1))
define("new_full", _filled(2))
define("scalar_tensor", _filled(0))


def _arange(reader: Reader, call: Call, at: Indices) -> T:
    form = overload_name(call.eqn.op)  # type: ignore[union-attr]
    start, step = (0, 1) if form == "default" else (call.args[0], call.args[2] if form == "start_step" else 1)
    if not all(isinstance(x, (int, float)) for x in (start, step)):
        raise Unlowerable("a range that starts or steps by a number known only at run time")
    if isinstance(start, int) and isinstance(step, int):
        return reader.emit.iota(at[0] * step + start).to(call.out.dtype)
    return reader.emit.iota(at[0]).to(call.out.dtype) * step + start  # type: ignore[operator]


define("arange", Rule(SOURCE, _arange))
