"""What a program writes to a cache: keys or values of one token of every sequence, in any of the ways to say so.

In: a value that may be a cache's new contents. Out: `Update`, the cache, what is new, where, and at which dimension the
cache has its length. A position is one number for all sequences, or one for each:

    cache.index_copy_(dim, position, new)                    one for all
    cache[:, :, position] = new;  cache[:, position] = new   one for all
    cache[arange(batch), :, positions] = new;  cache[arange(batch), positions] = new
    cache.scatter_(dim, positions.view(-1, 1, 1, 1).expand_as(new), new)
    for b in range(batch): cache[b].index_copy_(dim - 1, positions[b : b + 1], new[b])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from tessera.executors.rows.patterns.match import Pattern
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.schema import bind
from tessera.ops.rows import limits
from tessera.torch_internals.dispatch import DisableTorchDispatch


class Update(NamedTuple):
    cache: Value
    new: Value  # holds (batch, heads, head) in this order
    positions: Value
    dim: int


def update_of(p: Pattern, eqn: Equation) -> Update | None:
    """The update that an equation makes, if the kernels take it."""
    find = _FORMS.get(eqn.opname)
    update = find(p, eqn) if find is not None else None
    if update is None or not limits.cache(update.cache.tensor, update.dim) or update.new.dtype != update.cache.dtype:
        return None
    batch, heads, head = (n for i, n in enumerate(update.cache.shape) if i != update.dim)
    whole = _count(update.new) == batch * heads * head  # type: ignore[operator]
    return update if whole and is_position(update.positions, batch) else None  # type: ignore[arg-type]


def is_position(v: Value, batch: int) -> bool:
    """A place in the cache for all sequences, or one for each."""
    return v.dtype in limits.POSITIONS and _count(v) in (1, batch)


def counts(p: Pattern, v: Arg) -> bool:
    """0, 1, 2, …, whatever dimensions of size one stand around them."""
    if not isinstance(v, Value) or v.dtype not in limits.POSITIONS or sum(n != 1 for n in v.shape) > 1:
        return False
    v = p.in_order(v)
    tensor = p.trace.constants.get(v)
    if tensor is not None:
        with DisableTorchDispatch():
            return torch.equal(tensor.flatten(), torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device))
    eqn = p.maker(v, "arange")
    return eqn is not None and len(eqn.args) == 1


def _count(v: Value) -> int | None:
    """Elements, where that is known."""
    return math.prod(v.shape) if all(type(n) is int for n in v.shape) else None  # type: ignore[arg-type]


def _index_copy(p: Pattern, eqn: Equation) -> Update | None:
    cache, dim, positions, new = eqn.args
    assert isinstance(cache, Value) and isinstance(positions, Value) and isinstance(new, Value)
    return Update(cache, new, p.in_order(positions), dim % 4) if _count(positions) == 1 else None  # type: ignore[operator]


def _scatter(p: Pattern, eqn: Equation) -> Update | None:
    if len(eqn.args) != 4 or eqn.kwargs or not isinstance(eqn.args[3], Value):
        return None
    cache, dim, index, new = eqn.args
    assert isinstance(cache, Value) and isinstance(index, Value) and cache.ndim == index.ndim
    expand = p.maker(index, "expand", "repeat")
    if expand is None or index.shape != new.shape or new.shape[dim] != 1:  # type: ignore[union-attr,index]
        return None
    column = expand.inputs()[0]
    alike = all(n == 1 for n in (*[1] * (4 - column.ndim), *column.shape)[1:])
    return Update(cache, new, p.in_order(column), dim % 4) if alike else None  # type: ignore[operator,arg-type]


def _index_put(p: Pattern, eqn: Equation) -> Update | None:
    (cache, indices, new, accumulate), _ = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
    if accumulate or cache.ndim != 4:
        return None
    sequence, one, two, last = (*indices, *[None] * (4 - len(indices)))
    for dim, positions, head in ((2, two, one), (1, one, two)):
        others = ((sequence, cache.shape[0]), (head, cache.shape[3 - dim]))
        if positions is None or not all(v is None or counts(p, v) and _count(v) == size for v, size in others):
            continue
        if last is None and _in_order(sequence, positions, head):
            return Update(cache, new, p.in_order(positions), dim)
    return None


def _in_order(sequence: Value | None, positions: Value, head: Value | None) -> bool:
    """What indices pick stands sequence by sequence, then head by head: every index has one dimension, positions that
    of the sequences."""
    rank = max(v.ndim for v in (sequence, positions, head) if v is not None)

    def axes(v: Value | None) -> list[int]:
        sizes = () if v is None else (*[1] * (rank - v.ndim), *v.shape)
        return [i for i, n in enumerate(sizes) if n != 1]

    picked = axes(sequence) + axes(head)
    return axes(positions) in ([], axes(sequence)) and picked == sorted(set(picked))


def _one_by_one(p: Pattern, eqn: Equation) -> Update | None:
    """A chain of writes to one sequence after the other, each of which is written once."""
    batch, done, v = eqn.out.shape[0], {}, eqn.out
    versions, sources = {v}, []
    while (scatter := p.maker(v, "select_scatter")) is not None and len(done) != batch:
        base, inner, dim, b = scatter.args
        written = p.maker(inner, "index_copy")
        row = p.maker(written.args[0], "select") if written is not None else None
        if dim != 0 or b in done or row is None or row.args[1:] != (0, b):
            return None
        assert written is not None and isinstance(base, Value)
        sources.append(row.args[0])
        versions.add(base)
        done[b], v = written.args, base
    if sorted(done) != list(range(batch)) or not versions.issuperset(sources):  # type: ignore[call-overload]
        return None
    positions = {_whole(p, position, b) for b, (_, _, position, _) in done.items()}
    new = {_whole(p, copied, b) for b, (_, _, _, copied) in done.items()}
    dims = {dim % 3 for _, dim, _, _ in done.values()}
    if len(positions) != 1 or len(new) != 1 or len(dims) != 1 or None in positions | new:
        return None
    return Update(v, new.pop(), positions.pop(), dims.pop() + 1)  # type: ignore[arg-type]


def _whole(p: Pattern, v: Value, b: int) -> Value | None:
    """What a value is row `b` of, element by element."""
    eqn = p.maker(p.in_order(v), "select", "slice")
    if eqn is None:
        return None
    (source, dim, *where), _ = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
    return source if dim == 0 and where in ([b], [b, b + 1, 1]) else None


_FORMS: dict[str, Callable[[Pattern, Equation], Update | None]] = {
    "index_copy": _index_copy,
    "scatter": _scatter,
    "index_put": _index_put,
    "select_scatter": _one_by_one,
}
