"""Attention as tile kernels: two contractions with a softmax between them, written out in the dialect's own words.

A row is one query of one head. Scores are a contraction over the head's width, the result one over the keys; between
them the largest score is subtracted and the exponentials are summed, and the division comes last, as every target that
walks over the keys once wants it. A row with no key at all gives zero. Query heads that share a key head (`group`) may
be rows of one block (`packed`), so that keys are read once for all of them: right for a few queries.

`attention_parts` shares the keys of a row out to several programs, each of which leaves a sum of values, a maximum and
a sum of exponentials; `attention_whole` joins them. Sizes and strides are symbols: one kernel serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import Attribute, SSAValue

from tessera.tile.dialect.build import KernelBuilder, bf16, f32, i1
from tessera.tile.dialect.index import Index, name
from tessera.tile.dialect.ops import KernelOp

LEAST = float("-inf")


@dataclass(frozen=True)
class Attention:
    """What decides a kernel. The queries' width is also the keys'; `queries` matters where rows are packed."""

    width: int
    values: int  # width of a value
    group: int = 1  # query heads for every key head
    queries: int | None = None  # of a head, where that is known
    packed: bool = False  # rows of a block are queries of all heads of a group
    causal: bool = False  # query i sees keys up to i
    scale: float = 1.0
    mask: str = ""  # "add": to the scores; "where": it holds; of shape (batch, heads, queries, keys) by its strides
    element: Attribute = bf16

    @property
    def symbols(self) -> tuple[str, ...]:
        """Sizes, then the strides of query, key, value, result and mask; the last stride is one but for a mask's."""
        sizes = ("batch", "heads", "queries", "keys")
        strides = [f"{t}{d}" for t in ("q", "k", "v", "o", *(["m"] if self.mask else [])) for d in ("b", "h", "s")]
        return (*sizes, *strides, *(["mr"] if self.mask else []))


def attention(of: Attention) -> KernelOp:
    """softmax(q k' scale) v for every row. Buffers: q, k, v, the mask if there is one, the result."""
    k = KernelBuilder("attention", of.symbols)
    place = _axes(k, of)
    r = k.axis("r", "keys", reduce=True)
    k.axis("d", of.width, reduce=True)
    q, key, v, mask = _inputs(k, of)
    out = k.buffer(of.element)
    _, exponentials = _softmax(k, of, place, (q, key, mask), r, None)
    total = k.reduce("sum", exponentials, "r")
    wide = k.contract(k.cast(exponentials, of.element), k.load(v, place.value(r)), "r")
    k.store(k.cast(k.apply("div", wide, _not_zero(k, total)), of.element), out, place.result)
    return k.finish()


def attention_parts(of: Attention, parts: int) -> KernelOp:
    """As `attention`, of every part of the keys alone. Buffers end with, in f32: sums of values, maxima, sums."""
    k = KernelBuilder("attention_parts", of.symbols)
    part = k.axis("p", parts)
    place = _axes(k, of)
    chunk = (name("keys") + (parts - 1)) // parts
    r = k.axis("r", chunk, reduce=True)
    k.axis("d", of.width, reduce=True)
    q, key, v, mask = _inputs(k, of)
    sums, maxima, totals = (k.buffer(f32) for _ in range(3))
    at = part * chunk + r
    inside = k.apply("lt", k.iota(at), k.iota(name("keys")))
    top, exponentials = _softmax(k, of, place, (q, key, mask), at, inside)
    wide = k.contract(k.cast(exponentials, of.element), k.load(v, place.value(at), mask=inside), "r")
    row = part * place.rows + place.row
    k.store(wide, sums, row * of.values + name("c"))
    k.store(top, maxima, row)
    k.store(k.reduce("sum", exponentials, "r"), totals, row)
    return k.finish()


def attention_whole(of: Attention, parts: int) -> KernelOp:
    """The parts of every row joined. Buffers: sums of values, maxima, sums, the result."""
    k = KernelBuilder("attention_whole", of.symbols)
    place = _axes(k, of)
    part = k.axis("p", parts, reduce=True)
    sums, maxima, totals = (k.buffer(f32) for _ in range(3))
    out = k.buffer(of.element)
    row = part * place.rows + place.row
    tops = k.load(maxima, row)
    share = k.apply("exp", k.apply("sub", tops, _finite(k, k.reduce("max", tops, "p"))))
    total = k.reduce("sum", k.apply("mul", share, k.load(totals, row)), "p")
    value = k.reduce("sum", k.apply("mul", share, k.load(sums, row * of.values + name("c"))), "p")
    k.store(k.cast(k.apply("div", value, _not_zero(k, total)), of.element), out, place.result)
    return k.finish()


# --- where things lie -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    of: Attention
    head: Index  # of the query
    shared: Index  # of the key
    query: Index
    rows: Index  # in all
    row: Index

    @property
    def ask(self) -> Index:
        return _at("q", self.head, self.query) + name("d")

    def key(self, r: Index) -> Index:
        return _at("k", self.shared, r) + name("d")

    def value(self, r: Index) -> Index:
        return _at("v", self.shared, r) + name("c")

    @property
    def result(self) -> Index:
        return _at("o", self.head, self.query) + name("c")

    def mask(self, r: Index) -> Index:
        return _at("m", self.head, self.query) + r * name("mr")


def _at(tensor: str, head: Index, position: Index) -> Index:
    return name("b") * name(f"{tensor}b") + head * name(f"{tensor}h") + position * name(f"{tensor}s")


def _axes(k: KernelBuilder, of: Attention) -> _Place:
    """The parallel axes: batch, heads, rows, columns of the result. `heads` counts key heads."""
    b, h = k.axis("b", "batch"), k.axis("h", "heads")
    queries = name("queries") if of.queries is None else Index.of(of.queries)
    if of.packed:
        i = k.axis("i", queries * of.group)
        within, query, rows = i // queries, i % queries, queries * of.group
        head, shared = h * of.group + within, h
        row = (b * name("heads") + h) * rows + i
        total = name("batch") * name("heads") * rows
    else:
        g = k.axis("g", of.group) if of.group > 1 else Index.of(0)
        i = k.axis("i", queries)
        head, shared, query = h * of.group + g, h, i
        row = ((b * name("heads") + h) * of.group + g) * queries + i
        total = name("batch") * name("heads") * of.group * queries
    k.axis("c", of.values)
    return _Place(of, head, shared, query, total, row)


# --- arithmetic -------------------------------------------------------------------------------------------


def _inputs(k: KernelBuilder, of: Attention) -> tuple[SSAValue, SSAValue, SSAValue, SSAValue | None]:
    q, key, v = (k.buffer(of.element) for _ in range(3))
    return q, key, v, k.buffer(i1 if of.mask == "where" else of.element) if of.mask else None


def _softmax(
    k: KernelBuilder,
    of: Attention,
    place: _Place,
    given: tuple[SSAValue, SSAValue, SSAValue | None],
    r: Index,
    inside: SSAValue | None,
) -> tuple[SSAValue, SSAValue]:
    """The largest score of every row, and the exponentials of what scores lie below it."""
    q, key, mask = given
    score = k.contract(k.load(q, place.ask), k.load(key, place.key(r), mask=inside), "d")
    score = k.apply("mul", score, k.constant(of.scale, f32))
    if mask is not None:
        held = k.load(mask, place.mask(r), mask=inside)
        add = of.mask == "add"
        score = k.apply("add", score, k.cast(held, f32)) if add else _where(k, held, score, LEAST)
    if of.causal:
        score = _where(k, k.apply("le", k.iota(r), k.iota(place.query)), score, LEAST)
    if inside is not None:
        score = _where(k, inside, score, LEAST)
    top = k.reduce("max", score, "r")
    return top, k.apply("exp", k.apply("sub", score, _finite(k, top)))


def _where(k: KernelBuilder, condition: SSAValue, value: SSAValue, other: float) -> SSAValue:
    return k.apply("select", condition, value, k.constant(other, f32))


def _finite(k: KernelBuilder, top: SSAValue) -> SSAValue:
    """A maximum that can be subtracted: zero where there was nothing to take it of."""
    return k.apply("select", k.apply("eq", top, k.constant(LEAST, f32)), k.constant(0.0, f32), top)


def _not_zero(k: KernelBuilder, total: SSAValue) -> SSAValue:
    """A sum that can be divided by: what it divides is zero where it is."""
    return k.apply("select", k.apply("eq", total, k.constant(0.0, f32)), k.constant(1.0, f32), total)
