"""What happens to the heads of a token before they are used: a norm and a rotary embedding, which the operators do.

In: a value that holds `(batch, heads, head)` in this order. Out: the value before both, as far as there are any, and
what the operators need to do them.
"""

from __future__ import annotations

from tessera.executors.rows.patterns.match import Pattern, pairs
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.schema import bind
from tessera.ops.rows.operators import PLAIN


def heads_of(p: Pattern, v: Value, batch: int) -> tuple[Value, tuple[Arg, ...]]:
    """Heads before they were normalised and turned, and `prepare` as the operators take it."""
    plain, cosine, sine = _turned(p, v, batch) or _turned(p, p.in_order(v), batch) or (v, None, None)
    norm = p.norm(p.in_order(plain)) or p.norm(plain)
    if norm is None or norm.source.shape[-1] != v.shape[-1]:
        return p.in_order(plain), (*PLAIN[:3], cosine, sine)
    return p.in_order(norm.source), (norm.weight, norm.eps, norm.shift, cosine, sine)


def _turned(p: Pattern, v: Value, batch: int) -> tuple[Value, Value, Value] | None:
    """`x * cos + cat(-second half, first half) * sin` -> x, cos and sin."""
    for first, second in pairs(p.maker(v, "add")):
        for x, cosine in pairs(p.maker(first, "mul")):
            for crossed, sine in pairs(p.maker(second, "mul")):
                if isinstance(x, Value) and x.dtype == v.dtype and x.shape == v.shape and _crosses(p, crossed, x):
                    angles = [_angle(p, a, x, batch) for a in (cosine, sine)]
                    return None if None in angles else (x, *angles)  # type: ignore[return-value]
    return None


def _angle(p: Pattern, v: Arg, x: Value, batch: int) -> Value | None:
    """Cosines or sines of one position, the same for all heads of a sequence."""
    if not isinstance(v, Value) or not 0 < v.ndim <= x.ndim or x.ndim < 2 or x.shape[0] != batch:
        return None
    if not v.dtype.is_floating_point:
        return None
    sequences, *between, head = (*[1] * (x.ndim - v.ndim), *v.shape)
    shared = head == x.shape[-1] and all(n == 1 for n in between) and sequences in (1, batch)
    rows = p.in_order(v)
    return rows if shared and rows.shape[-1] == head and rows.tensor.stride[-1] == 1 else None


def _crosses(p: Pattern, v: Arg, x: Value) -> bool:
    """`cat(-second half, first half)` of x."""
    joined = p.maker(v, "cat")
    if joined is None or not _last(joined, x.ndim):
        return False
    parts = joined.args[0]
    negative = p.maker(parts[0], "neg") if len(parts) == 2 else None  # type: ignore[index,arg-type]
    return negative is not None and _halves(p, x, parts[1], negative.args[0])  # type: ignore[index]


def _last(cat: Equation, rank: int) -> bool:
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    return dim in (-1, rank - 1)


def _halves(p: Pattern, x: Value, low: Arg, high: Arg) -> bool:
    """The two halves of x along its last dimension."""
    eqn = p.maker(low, "chunk", "split")
    size = x.shape[-1]
    if eqn is not None:
        whole = eqn.args[0] is x and eqn.args[1] == (2 if eqn.opname == "chunk" else size // 2)  # type: ignore[union-attr]
        return whole and list(eqn.outputs) == [low, high] and _last(eqn.with_(args=eqn.args[1:]), x.ndim)
    return _slice_of(p, low, x) == (0, size // 2) and _slice_of(p, high, x) == (size // 2, size)


def _slice_of(p: Pattern, v: Arg, x: Value) -> tuple[int, int] | None:
    eqn = p.maker(v, "slice")
    if eqn is None or eqn.args[0] is not x:
        return None
    (_, dim, start, end, step), _ = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
    if dim not in (-1, x.ndim - 1) or step != 1:
        return None
    size = x.shape[-1]
    return (start or 0, size if end is None or end > size else end)  # type: ignore[return-value,operator]
