"""Sharding rules of look-ups. A table may be cut along what is looked up: each rank finds what it has, others give
zeros, and the results are summands."""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.types import Size, size_key
from tessera.ops.factors.rule import Cut, Factors, in_words, rule, tensors

ROWS = "v"


def _own(ids: Value, size: Size, rows: Size, cut: Cut) -> tuple[Value, Value]:
    """Places in a rank's own rows, and which of them are its own. What belongs to other ranks is spread over all rows,
    since a GPU adds up one row's gradients one after the other; what is no row anywhere stays so, and is refused."""
    here = aten.sub(ids, cut.start(size, cut.axes[ROWS], ids.tensor.device))
    mine = aten.logical_and(aten.ge(here, 0), aten.lt(here, rows))
    there = aten.logical_and(aten.ge(ids, 0), aten.lt(ids, size))
    return aten.where(there, aten.remainder(here, rows), ids), mine


def _kept(x: Value, mine: Value) -> Value:
    return aten.masked_fill(x, aten.unsqueeze(aten.logical_not(mine), -1), 0)


def _embedding_here(eqn: Equation, cut: Cut) -> object:
    table, ids = tensors(eqn)
    if not cut.axes.get(ROWS):
        return aten.embedding(*eqn.args, **eqn.kwargs)
    places, mine = _own(ids, cut.whole[0][0], table.shape[0], cut)
    return _kept(aten.embedding(table, places), mine)


@rule("embedding")
def embedding(eqn: Equation) -> Factors | None:
    return in_words(eqn, f"{ROWS} d, ... -> ... d", sums=ROWS, linear=((0,),), local=_embedding_here, unread=ROWS)


def _embedding_backward_here(eqn: Equation, cut: Cut) -> object:
    ct, ids = tensors(eqn)
    positional, _ = eqn.bound()
    _, _, count, padding, by_count = positional
    if not cut.axes.get(ROWS):
        return aten.embedding_dense_backward(ct, ids, count, padding, by_count)
    rows = cut.sizes()[0]
    places, mine = _own(ids, count, rows, cut)
    if padding >= 0:
        mine = aten.logical_and(mine, aten.ne(ids, padding))
    return aten.embedding_dense_backward(_kept(ct, mine), places, rows, -1, False)


@rule("embedding_dense_backward")
def embedding_backward(eqn: Equation) -> Factors | None:
    if eqn.bound()[0][4]:  # how often a row occurs is known to nobody alone
        return None
    return in_words(eqn, f"... d, ... -> {ROWS} d", sums="...", linear=((0,),), local=_embedding_backward_here)


@rule("index_select")
def index_select(eqn: Equation) -> Factors | None:
    x, _ = tensors(eqn)
    if x.ndim == 0:
        return None
    dim = eqn.bound()[0][1] % x.ndim
    rest = [f"d{i}" for i in range(x.ndim)]
    left = " ".join("v!" if i == dim else d for i, d in enumerate(rest))
    right = " ".join("n" if i == dim else d for i, d in enumerate(rest))
    return in_words(eqn, f"{left}, n -> {right}", linear=((0,),))


def _gather_here(eqn: Equation, cut: Cut) -> object:
    x, ids = tensors(eqn)
    dim = eqn.bound()[0][1]
    if not cut.axes.get(ROWS):
        return aten.gather(x, dim, ids)
    places, mine = _own(ids, cut.whole[0][dim], x.shape[dim], cut)
    picked = aten.gather(x, dim, places)
    return aten.where(mine, picked, aten.zeros_like(picked))


@rule("gather")
def gather(eqn: Equation) -> Factors | None:
    x, ids = tensors(eqn)
    if x.ndim == 0 or ids.ndim == 0:
        return None
    dim = eqn.bound()[0][1] % x.ndim
    equal = [size_key(a) == size_key(b) for a, b in zip(x.shape, ids.shape, strict=True)]
    left = " ".join(ROWS if i == dim else f"d{i}" if same else f"x{i}!" for i, same in enumerate(equal))
    right = " ".join("n" if i == dim else f"d{i}" if same else f"i{i}!" for i, same in enumerate(equal))
    return in_words(eqn, f"{left}, {right} -> {right}", sums=ROWS, linear=((0,),), local=_gather_here, unread=ROWS)


@rule("scatter_add scatter.src scatter.value")
def scatter(eqn: Equation) -> Factors | None:
    """Other dimensions than the one that is written along may be cut, where all have the same size."""
    x, ids, *source = tensors(eqn)
    if x.ndim == 0 or ids.ndim != x.ndim:
        return None
    dim = eqn.bound()[0][1] % x.ndim

    def term(v: Value, along: str) -> str:
        shared = [
            size_key(n) == size_key(m) == size_key(k) for n, m, k in zip(v.shape, x.shape, ids.shape, strict=True)
        ]
        return " ".join(along if i == dim else f"d{i}" if same else f"{along[0]}{i}!" for i, same in enumerate(shared))

    left = ", ".join([term(x, "v!"), term(ids, "n!"), *(term(v, "n!") for v in source)])
    linear = ((0, 2),) if source else ()
    return in_words(eqn, f"{left} -> {term(x, 'v!')}", linear=linear)


@rule("index_copy index_add")
def written_rows(eqn: Equation) -> Factors | None:
    """Other dimensions than the one that is written along may be cut, as a cache of keys is along heads."""
    x, _, source = tensors(eqn)
    if x.ndim == 0 or source.ndim != x.ndim:
        return None
    dim = eqn.bound()[0][1] % x.ndim
    left = " ".join("v!" if i == dim else f"d{i}" for i in range(x.ndim))
    given = " ".join("n!" if i == dim else f"d{i}" for i in range(x.ndim))
    return in_words(eqn, f"{left}, n!, {given} -> {left}", linear=((0, 2),))


def _indices(eqn: Equation) -> tuple[list[Arg], bool]:
    indices = list(eqn.args[1])  # type: ignore[call-overload]
    there = [i for i, v in enumerate(indices) if v is not None]
    together = there == list(range(there[0], there[-1] + 1)) if there else False
    masks = any(isinstance(v, Value) and not v.tensor.is_float and str(v.dtype) == "torch.bool" for v in indices)
    return indices, together and not masks


@rule("index_put")
def put_rows(eqn: Equation) -> Factors | None:
    """Rows that one index chooses are written: other dimensions may be cut."""
    indices, plain = _indices(eqn)
    there = [d for d, v in enumerate(indices) if v is not None]
    x, ids, source = tensors(eqn) if len(there) == 1 else (None, None, None)
    if not plain or x is None or ids is None or source is None or ids.ndim != 1 or source.ndim > x.ndim:
        return None
    (dim,) = there
    left = " ".join("v!" if d == dim else f"d{d}" for d in range(x.ndim))
    first = x.ndim - source.ndim  # what is written broadcasts
    sizes = [size_key(ids.shape[0] if d == dim else n) for d, n in enumerate(x.shape)][first:]
    names = ["n!" if d == dim else f"d{d}" for d in range(first, x.ndim)]
    same = [size_key(n) == m for n, m in zip(source.shape, sizes, strict=True)]
    given = " ".join(name if fits else "1" for name, fits in zip(names, same, strict=True))
    return in_words(eqn, f"{left}, n!, {given} -> {left}")


@rule("index.Tensor")
def index(eqn: Equation) -> Factors | None:
    """Dimensions that are not indexed may be cut, and those of the indices."""
    indices, plain = _indices(eqn)
    if not plain:
        return None
    x, *ids = tensors(eqn)
    first = next(i for i, v in enumerate(indices) if v is not None)
    rank = max(v.ndim for v in ids)
    sizes = [[size_key(n) for n in [1] * (rank - v.ndim) + list(v.shape)] for v in ids]
    broad = [next((row[d] for row in sizes if row[d] != 1), 1) for d in range(rank)]

    def term(v: Value, row: list) -> str:
        return " ".join("1" if row[d] == 1 and broad[d] != 1 else f"i{d}" for d in range(rank - v.ndim, rank))

    indexed = {i for i, v in enumerate(indices) if v is not None}
    left = " ".join(f"x{d}!" if d in indexed else f"d{d}" for d in range(x.ndim))
    rest = [f"d{d}" for d in range(x.ndim) if d not in indexed]
    right = [*rest[:first], *(f"i{d}" for d in range(rank)), *rest[first:]]
    terms = ", ".join([left, *(term(v, row) for v, row in zip(ids, sizes, strict=True))])
    return in_words(eqn, f"{terms} -> {' '.join(right)}", linear=((0,),))
