"""Rotary positions that are written out: pairs of elements are turned by an angle for each place.

x * cos + cat([-x2, x1]) * sin              the halves of `cos` and `sin` are the same
cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin])     with x1, x2 the halves of x
stack([x1 * cos - x2 * sin, …], -1).flatten(-2)     with x1, x2 its even and odd elements
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.exporters.onnx.errors import NoForm
from tessera.exporters.onnx.graph import Graph, Ref, same
from tessera.exporters.onnx.patterns.makers import Makers, both_ways, is_float, is_plain
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.types import size_key

if TYPE_CHECKING:
    from tessera.exporters.onnx.lower import Lowering

# What leaves equal halves of the last dimension equal.
_BY_ELEMENT = ("cos", "sin", "_to_copy", "to", "clone", "contiguous", "alias", "neg", "exp")
_BY_ROW = ("unsqueeze", "expand", "index", "embedding", "slice", "select", "view", "reshape", "index_select")


@dataclass(frozen=True)
class Turn:
    x: Value
    cos: Value
    sin: Value
    interleaved: bool
    doubled: bool  # cos and sin are as wide as x


def rotary(eqn: Equation, makers: Makers) -> Callable[[Lowering], Ref] | None:
    if eqn.opname not in ("add", "cat", "reshape", "view", "flatten") or not _is_rows_of_heads(eqn.outputs[0]):
        return None
    turn = _added(eqn, makers) if eqn.opname == "add" else _joined(eqn, makers)
    if turn is None or not turn.x.dtype == turn.cos.dtype == turn.sin.dtype == eqn.out.dtype:
        return None
    places = _places(turn)
    if places is None:
        return None
    tables = [_before_views(v, makers) for v in (turn.cos, turn.sin)]
    return lambda lowering: _write(lowering, turn, places, tables)


def _is_rows_of_heads(v: Value | None) -> bool:
    return v is not None and is_float(v) and is_plain(v.dtype) and len(v.shape) == 4 and isinstance(v.shape[3], int)


# --- what is written ---


def _places(turn: Turn) -> int | None:
    """Which dimension of x the angles go along: 2 of (batch, heads, length, width), or 1 of (batch, length, …)."""
    width = int(turn.x.shape[3]) if turn.doubled else int(turn.x.shape[3]) // 2
    if any(not 2 <= len(v.shape) <= 4 or not same(v.shape[-1], width) for v in (turn.cos, turn.sin)):
        return None
    shapes = [[1] * (4 - len(v.shape)) + list(v.shape) for v in (turn.cos, turn.sin)]
    if [*map(size_key, shapes[0])] != [*map(size_key, shapes[1])]:
        return None
    batch, first, second, _ = shapes[0]
    if not same(batch, 1) and not same(batch, turn.x.shape[0]):
        return None
    if same(first, 1) and same(second, turn.x.shape[2]):
        return 2
    return 1 if same(second, 1) and same(first, turn.x.shape[1]) else None


def _before_views(v: Value, makers: Makers) -> Value:
    """The table that all layers read, before each of them lays it beside its heads."""
    while (eqn := makers.of(v, "unsqueeze")) is not None:
        (v,) = eqn.inputs()
    return v


def _write(lowering: Lowering, turn: Turn, places: int, tables: list[Value]) -> Ref:
    g, x = lowering.g, lowering.env[turn.x]
    batch, length = x.sizes[0], x.sizes[places]
    width, heads = int(x.sizes[3]), x.sizes[3 - places]
    if places == 1 and not isinstance(heads, int):
        raise NoForm
    one = len(turn.cos.shape) < 4 or same(turn.cos.shape[0], 1)
    angles = [_angles(g, lowering.env[v], turn.doubled, (batch, length, width // 2), one) for v in tables]
    alternate = int(turn.interleaved)
    if places == 2:
        return g.op("RotaryEmbedding", x, *angles, shape=x.shape, interleaved=alternate)
    rows = g.reshape(x, [batch, length, heads * width])
    out = g.op("RotaryEmbedding", rows, *angles, num_heads=heads, shape=rows.shape, interleaved=alternate)
    return g.reshape(out, x.sizes)


def _angles(g: Graph, x: Ref, doubled: bool, shape: tuple, one: bool) -> Ref:
    """A table of (batch, length, width / 2), which all layers share; `one` serves the whole batch."""

    def write() -> Ref:
        half = g.slice(x, x.ndim - 1, 0, shape[2]) if doubled else x
        half = Ref(half.name, half.dtype, (*x.sizes[:-1], shape[2]))
        return g.expand(g.reshape(half, [1 if one else shape[0], *shape[1:]]), shape)

    return g.once(("angles", x.name, *map(size_key, shape)), write)


# --- what is looked for ---


def _added(eqn: Equation, makers: Makers) -> Turn | None:
    """`x * cos + turned(x) * sin`."""
    if eqn.kwargs or len(eqn.args) != 2:
        return None
    first, second = (makers.pair(a, "mul") for a in eqn.args)
    if first is None or second is None:
        return None
    for straight, across in ((first, second), (second, first)):
        for turned, sin in both_ways(across):
            x = _quarter_turn(turned, makers)
            if x is None or x not in straight:
                continue
            cos = straight[1] if straight[0] is x else straight[0]
            if _equal_halves(cos, makers) and _equal_halves(sin, makers):
                return Turn(x, cos, sin, interleaved=False, doubled=True)
    return None


def _quarter_turn(v: Arg, makers: Makers) -> Value | None:
    """x of `cat([-x2, x1], -1)`."""
    joined = makers.of(v, "cat", "concat")
    if joined is None or not _along_last(joined) or len(joined.args[0]) != 2:  # type: ignore[arg-type]
        return None
    first, second = joined.args[0]  # type: ignore[misc]
    negative = makers.of(first, "neg")
    if negative is None:
        return None
    upper, lower = _part(negative.args[0], makers), _part(second, makers)
    if upper is None or lower is None or upper[0] is not lower[0]:
        return None
    return upper[0] if (upper[1:], lower[1:]) == ((1, False), (0, False)) else None


def _joined(eqn: Equation, makers: Makers) -> Turn | None:
    """Both halves turned, side by side or alternating."""
    pieces = eqn
    interleaved = eqn.opname != "cat"
    if interleaved:
        stacked = makers.of(eqn.args[0], "stack")
        if stacked is None or not same(stacked.out.shape[-1], 2) or len(stacked.out.shape) != 5:
            return None
        pieces = stacked
    if not _along_last(pieces) or len(pieces.args[0]) != 2:  # type: ignore[arg-type]
        return None
    first, second = pieces.args[0]  # type: ignore[misc]
    less, more = makers.of(first, "sub"), makers.of(second, "add")
    if less is None or more is None or less.kwargs or more.kwargs:
        return None
    terms = [makers.pair(a, "mul") for a in (*less.args, *more.args)]
    if len(terms) != 4 or None in terms:
        return None
    (a, cos), (b, sin) = (_with_part(t, makers) for t in terms[:2])
    if a is None or b is None or a[0] is not b[0] or (a[1:], b[1:]) != ((0, interleaved), (1, interleaved)):
        return None
    expected = {(1, cos), (0, sin)}  # x2 * cos + x1 * sin
    other = [_with_part(t, makers) for t in terms[2:]]
    if any(p is None or p[0] is not a[0] or p[2] != interleaved for p, _ in other):
        return None
    if {(p[1], factor) for p, factor in other if p is not None} != expected or cos is None or sin is None:
        return None
    return Turn(a[0], cos, sin, interleaved, doubled=False)


Part = tuple[Value, int, bool]  # of which value, which half, and whether elements alternate


def _with_part(pair: tuple[Value, Value] | None, makers: Makers) -> tuple[Part | None, Value | None]:
    """A product of a half of something and a factor."""
    for v, factor in both_ways(pair):
        if (part := _part(v, makers)) is not None:
            return part, factor
    return None, None


def _part(v: Arg, makers: Makers) -> Part | None:
    """Which half of the last dimension a value is."""
    eqn = makers.of(v, "slice", "split", "chunk", "split_with_sizes", "narrow", "select", "unbind")
    if eqn is None:
        return None
    args, _ = eqn.bound()
    x = args[0]
    if not isinstance(x, Value) or not isinstance(x.shape[-1], int):
        return None
    width, last = x.shape[-1], len(x.shape) - 1
    if eqn.opname in ("select", "unbind"):
        return _of_pairs(x, args, eqn, v, makers)
    dim = args[1] if eqn.opname in ("slice", "narrow") else args[2]
    if not isinstance(dim, int) or dim % len(x.shape) != last or width % 2:
        return None
    if eqn.opname == "slice":
        start, end, step = args[2] or 0, width if args[3] is None else args[3], args[4]
        if not all(isinstance(n, int) for n in (start, end, step)):
            return None
        span = range(width)[start:end:step]  # type: ignore[misc]
        if (span.start, span.step) in ((0, 2), (1, 2)) and len(span) == width // 2:
            return x, span.start, True
        return (x, span.start // (width // 2), False) if span in (range(width // 2), range(width // 2, width)) else None
    if eqn.opname == "narrow":
        return (x, 0 if args[2] == 0 else 1, False) if args[2] in (0, width // 2) and args[3] == width // 2 else None
    halves = len(eqn.outputs) == 2 and all(o is None or o.shape[-1] == width // 2 for o in eqn.outputs)
    return (x, eqn.outputs.index(v), False) if halves else None  # type: ignore[arg-type]


def _of_pairs(pairs: Value, args: list, eqn: Equation, v: Arg, makers: Makers) -> Part | None:
    """`x.view(…, width / 2, 2)[…, i]`."""
    dim, split = args[1], makers.of(pairs, "view", "reshape", "unflatten")
    if split is None or dim % len(pairs.shape) != len(pairs.shape) - 1 or pairs.shape[-1] != 2:
        return None
    x = split.args[0]
    assert isinstance(x, Value)
    if len(x.shape) != len(pairs.shape) - 1 or not all(map(same, x.shape[:-1], pairs.shape)):
        return None
    which = args[2] % 2 if eqn.opname == "select" else eqn.outputs.index(v)  # type: ignore[arg-type]
    return x, which, True


def _along_last(joined: Equation) -> bool:
    args, _ = joined.bound()
    dim = args[1]
    return isinstance(dim, int) and dim % len(joined.out.shape) == len(joined.out.shape) - 1


def _equal_halves(v: Arg, makers: Makers) -> bool:
    """The second half of the last dimension is known to be the first again."""
    if not isinstance(v, Value):
        return False
    joined = makers.of(v, "cat", "concat")
    if joined is not None:
        pieces = joined.args[0]
        return isinstance(pieces, (list, tuple)) and len(pieces) == 2 and pieces[0] is pieces[1] and _along_last(joined)
    if (eqn := makers.of(v, *_BY_ELEMENT)) is not None:
        return _equal_halves(eqn.args[0], makers)
    if (eqn := makers.of(v, "mul", "div")) is not None and not isinstance(eqn.args[1], Value):
        return _equal_halves(eqn.args[0], makers)
    if (eqn := makers.of(v, "repeat")) is not None:
        source = eqn.args[0]
        return isinstance(source, Value) and eqn.args[1][-1] == 2 and same(v.shape[-1], 2 * source.shape[-1])  # type: ignore[index]
    if (eqn := makers.of(v, *_BY_ROW)) is not None:
        source = eqn.args[0]
        whole = isinstance(source, Value) and len(source.shape) > 0 and same(source.shape[-1], v.shape[-1])
        return whole and _rows_stay(eqn) and _equal_halves(source, makers)
    return False


def _rows_stay(eqn: Equation) -> bool:
    """Rows of the last dimension are chosen or repeated, and stay as they are."""
    args, _ = eqn.bound()
    source, out = args[0], eqn.out
    if eqn.opname == "unsqueeze":
        return args[1] % len(out.shape) != len(out.shape) - 1
    if eqn.opname in ("slice", "select", "index_select"):
        return args[1] % len(source.shape) != len(source.shape) - 1
    if eqn.opname == "index":
        return len(args[1]) < len(source.shape) or args[1][-1] is None
    return True
