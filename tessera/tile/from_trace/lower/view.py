"""Lowerings of views: the same element at another index.

`pull` gives the index into the argument for an index into the result. A view that shows every element once also has
`push`, the other way: through it the kernel learns at which of its points an element of a view is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.ir.equation import Arg, Value
from tessera.ir.types import Size, settled
from tessera.ir.views import MAY_COPY, RESHAPES
from tessera.tile.from_trace.index import (
    ONE,
    ZERO,
    Index,
    Indices,
    Ranges,
    Unlowerable,
    groups,
    is_symbolic,
    size_index,
    sizes_of,
    strides_of,
)
from tessera.tile.from_trace.lower.rule import VIEW, Call, Move, Reader, Rule, define, dims_of, wrap
from tessera.tile.from_trace.values import T
from tessera.util.names import names


def view(texts: str, pull: Move, push: Move | None = None) -> None:
    def lower(reader: Reader, call: Call, at: Indices) -> T:
        return reader.read(call.first, pull(reader.ranges, call, at))

    define(texts, Rule(VIEW, lower, pull, push))


def shape_of(v: Value) -> Indices:
    return sizes_of(v.shape)


def _index(x: Arg) -> Index:
    if isinstance(x, int) or is_symbolic(x):
        return size_index(x)  # type: ignore[arg-type]
    raise Unlowerable(f"an index {x} that is known only at run time")


# --- every element once: dimensions in another order, or cut otherwise ----------------------------------


def _regroup_pull(ranges: Ranges, call: Call, at: Indices) -> Indices:
    return ranges.reshape(at, shape_of(call.out), shape_of(call.first))


def _regroup_push(ranges: Ranges, call: Call, at: Indices) -> Indices:
    return ranges.reshape(at, shape_of(call.first), shape_of(call.out))


view(
    "view.default _unsafe_view reshape flatten unflatten view_as reshape_as ravel squeeze unsqueeze _reshape_alias",
    _regroup_pull,
    _regroup_push,
)


def _same(ranges: Ranges, call: Call, at: Indices) -> Indices:
    return at


view("alias detach lift_fresh lift positive", _same, _same)


def _order(call: Call) -> list[int]:
    """Which dimension of the argument each dimension of the result is."""
    rank = call.first.ndim
    name, args = call.eqn.opname, call.args[1:]
    if name == "permute":
        return [wrap(d, rank) for d in args[0]]  # type: ignore[union-attr]
    order = list(range(rank))
    if name == "numpy_T":
        return order[::-1]
    if name in ("movedim", "moveaxis"):
        return _moved(rank, *args[:2])
    if rank < 2:
        return order
    a, b = {"t": (0, 1), "mT": (-2, -1)}[name] if name in ("t", "mT") else args[:2]  # type: ignore[misc]
    a, b = wrap(a, rank), wrap(b, rank)  # type: ignore[arg-type]
    order[a], order[b] = order[b], order[a]
    return order


def _moved(rank: int, source: Arg, into: Arg) -> list[int]:
    froms, tos = ([wrap(d, rank) for d in (x if isinstance(x, (list, tuple)) else [x])] for x in (source, into))
    rest = iter(d for d in range(rank) if d not in froms)
    return [froms[tos.index(d)] if d in tos else next(rest) for d in range(rank)]


def _permute_pull(ranges: Ranges, call: Call, at: Indices) -> Indices:
    order = _order(call)
    return tuple(at[order.index(d)] for d in range(len(order)))


def _permute_push(ranges: Ranges, call: Call, at: Indices) -> Indices:
    return tuple(at[d] for d in _order(call))


view("permute transpose t mT numpy_T swapaxes swapdims movedim moveaxis", _permute_pull, _permute_push)


def _flip(ranges: Ranges, call: Call, at: Indices) -> Indices:
    rank, shape = call.first.ndim, shape_of(call.first)
    turned = dims_of(call.args[1], rank) if call.args[1] else []
    return tuple(shape[d] - 1 - i if d in turned else i for d, i in enumerate(at))


view("flip", _flip)

# --- views that may have to copy --------------------------------------------------------------------------

COPIES = names("flip repeat tile roll")


def copies(call: Call) -> bool:
    """The result has memory of its own: dimensions that become one do not lie in memory as one."""
    name = call.eqn.opname
    if name not in MAY_COPY & RESHAPES:
        return name in COPIES
    shape, stride = shape_of(call.first), strides_of(call.first.tensor.stride)
    for left, _ in groups(shape, shape_of(call.out)):
        wide = [d for d in left if shape[d] != ONE]
        if any(stride[a] != stride[b] * shape[b] for a, b in zip(wide, wide[1:], strict=False)):
            return True
    return False


# --- some elements, or some more than once --------------------------------------------------------------


def _expand(ranges: Ranges, call: Call, at: Indices) -> Indices:
    own = at[len(at) - call.first.ndim :]
    return tuple(ZERO if size == ONE else i for i, size in zip(own, shape_of(call.first), strict=True))


view("expand expand_as broadcast_to", _expand)


def _shifted(dim: int, start: Index, step: Index = ONE) -> Callable[[Indices], Indices]:
    return lambda at: tuple(start + step * i if d == dim else i for d, i in enumerate(at))


def start_of(x: Arg, size: Size) -> Index:
    """Where a slice begins; beyond the end nothing is read, so only negative starts count."""
    return ZERO if x is None else _index(x if not _holds(x < 0) else 0 if _holds(x + size < 0) else x + size)  # type: ignore[operator]


def from_start(x: Arg, size: Size) -> Index:
    """A place that may be counted from the end."""
    return _index(x + size if _holds(x < 0) else x)  # type: ignore[operator]


def _holds(truth: bool | torch.SymBool) -> bool:
    """A comparison of sizes that PyTorch made when it recorded the view, under a guard if it had to."""
    answer = settled(truth)
    if answer is None:
        raise Unlowerable(f"an index for which nobody knows whether {truth}")
    return answer


def _slice(ranges: Ranges, call: Call, at: Indices) -> Indices:
    _, dim, start, _, step = call.args[:5]
    dim = wrap(dim, call.first.ndim)  # type: ignore[arg-type]
    return _shifted(dim, start_of(start, call.first.shape[dim]), _index(step))(at)


def _narrow(ranges: Ranges, call: Call, at: Indices) -> Indices:
    dim = wrap(call.args[1], call.first.ndim)  # type: ignore[arg-type]
    return _shifted(dim, start_of(call.args[2], call.first.shape[dim]))(at)


def _select(ranges: Ranges, call: Call, at: Indices) -> Indices:
    dim = wrap(call.args[1], call.first.ndim)  # type: ignore[arg-type]
    return (*at[:dim], from_start(call.args[2], call.first.shape[dim]), *at[dim:])


def _piece(ranges: Ranges, call: Call, at: Indices) -> Indices:
    """split and its kin: a piece starts where the ones before it end."""
    dim = wrap(call.args[2], call.first.ndim)  # type: ignore[arg-type]
    before = [v for v in call.eqn.outputs[: call.number]]
    if any(v is None for v in before):
        raise Unlowerable("a split some of whose pieces are not there")
    start = sum((shape_of(v)[dim] for v in before), ZERO)  # type: ignore[arg-type]
    return _shifted(dim, start)(at)


def _unbind(ranges: Ranges, call: Call, at: Indices) -> Indices:
    dim = wrap(call.args[1], call.first.ndim)  # type: ignore[arg-type]
    return (*at[:dim], Index.of(call.number), *at[dim:])


def _diagonal(ranges: Ranges, call: Call, at: Indices) -> Indices:
    offset, a, b = call.args[1], *(wrap(d, call.first.ndim) for d in call.args[2:4])  # type: ignore[arg-type]
    if not isinstance(offset, int):
        raise Unlowerable("a diagonal known only at run time")
    rest = list(at[:-1])
    moved = {a: at[-1] + max(-offset, 0), b: at[-1] + max(offset, 0)}
    return tuple(moved[d] if d in moved else rest.pop(0) for d in range(call.first.ndim))


def _unfold(ranges: Ranges, call: Call, at: Indices) -> Indices:
    dim, step = wrap(call.args[1], call.first.ndim), _index(call.args[3])  # type: ignore[arg-type]
    return tuple(i * step + at[-1] if d == dim else i for d, i in enumerate(at[:-1]))


def _repeat(ranges: Ranges, call: Call, at: Indices) -> Indices:
    own = at[len(at) - call.first.ndim :]
    return tuple(ranges.mod(i, size) for i, size in zip(own, shape_of(call.first), strict=True))


def _roll(ranges: Ranges, call: Call, at: Indices) -> Indices:
    shifts, dims = call.args[1], call.args[2]
    shape = shape_of(call.first)
    if not dims or not all(isinstance(s, int) for s in shifts):  # type: ignore[union-attr]
        raise Unlowerable("a roll over the flattened tensor, or by a size known only at run time")
    rolled = list(at)
    for shift, dim in zip(shifts, dims, strict=True):  # type: ignore[arg-type]
        d = wrap(dim, call.first.ndim)
        if (number := shape[d].constant) is None:
            raise Unlowerable("a roll along a dimension of unknown size")
        rolled[d] = ranges.mod(rolled[d] + (-shift) % number, shape[d])
    return tuple(rolled)


view("slice", _slice)
view("narrow", _narrow)
view("select.int", _select)
view("split split_with_sizes chunk unsafe_split unsafe_split_with_sizes unsafe_chunk", _piece)
view("unbind", _unbind)
view("diagonal", _diagonal)
view("unfold", _unfold)
view("repeat tile", _repeat)
view("roll", _roll)
