"""How one equation is cut: which axis of the mesh splits which factor.

In: the equation's `Factors`, where its operands lie, where its results shall lie. Out: a `Choice`, the cheapest of all
by the bytes that its operands and results must be moved. For each axis there is a choice between the factors that some
operand, or a result that is pinned, is split along; passing summands through, where the operator is linear; or neither.
A factor that nobody has split is not thought of: what the user did not place is not moved about.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tessera.ir.equation import Value
from tessera.ir.mesh import Mesh
from tessera.ir.placement import PLAIN, Axes, Mark, Placement, chunk, cuts_evenly
from tessera.ir.types import Size, size_hint
from tessera.ops.factors.rule import Dims, Factors

Label = tuple[str, Mark]  # a factor, and how it is cut
PASS: Label = ("+", PLAIN)  # summands go in, summands come out
NEITHER: Label = ("", PLAIN)
JOIN = "&"  # between two factors that one axis cuts at once
RING, EXPERTS = "ring", "experts"  # ways of exchanging operands
LEAST = 1e-6  # of a byte, what an element more on a rank is worth: of equal ways the one with less work


@dataclass(frozen=True)
class Choice:
    axes: Mapping[str, Axes]  # of each factor that is split
    operands: tuple[Placement, ...]
    results: tuple[Placement | None, ...]
    marks: Mapping[str, Mark] = field(default_factory=dict)  # of each axis that splits a factor


@dataclass(frozen=True)
class Question:
    """What is asked about one equation."""

    mesh: Mesh
    rule: Factors
    operands: Sequence[Value]
    results: Sequence[Value | None]
    held: Sequence[Sequence[Placement]]  # where each operand lies; the first is its own place, others are copies
    pinned: Sequence[Placement | None]  # where results shall lie
    may_pass: Sequence[bool]  # nobody else reads the operand
    move: Callable[[int, Placement], float]  # what it costs to bring an operand there
    settle: Callable[[int, Placement], float]  # what it costs to bring a pinned result to its place from there
    ways: Mapping[str, str] = field(default_factory=dict)  # of axes along which operands may be exchanged, how


def choose(question: Question) -> Choice:
    """The cheapest way."""
    best, least = None, float("inf")
    for choice in _choices(question):
        price = _price(question, choice)
        if price < least:
            best, least = choice, price
    assert best is not None  # nothing split and nothing passed is always among them
    return best


def _choices(q: Question) -> Iterator[Choice]:
    labels = [list(dict.fromkeys(_labels(q, axis))) for axis in q.mesh.names]
    for combination in itertools.product(*labels):
        choice = _choice(q, dict(zip(q.mesh.names, combination, strict=True)))
        if choice is not None:
            yield choice


def _labels(q: Question, axis: str) -> Iterator[Label]:
    """What an axis may do, in the order in which equal prices are settled."""
    for group in q.rule.linear:
        if _passes(q, axis, group):
            yield PASS
    sides = (
        *zip(q.rule.operands, (p for p in q.held), strict=True),
        *((dims, [pin]) for dims, pin in zip(q.rule.results, q.pinned, strict=True) if dims is not None and pin),
    )
    if q.ways.get(axis) == EXPERTS:
        split = {f for dims, ps in sides for p in ps if (d := p.dim_of(axis)) is not None for f in dims[d][:1]}
        yield from ((JOIN.join(pair), PLAIN) for pair in q.rule.pairs if split.issuperset(pair))
    for dims, placements in sides:
        for placement in placements:
            dim = placement.dim_of(axis)
            cut = None if dim is None else q.rule.cut_by(dims[dim], placement.mark(axis))
            if cut is None:
                continue
            if q.rule.splittable(cut[0]) or (q.ways.get(axis) == RING and cut[0] in q.rule.around):
                yield cut
            elif cut[0] in q.rule.whole:
                yield from ((factor, PLAIN) for factor in sorted(q.rule.instead))
    yield NEITHER


def _passes(q: Question, axis: str, group: frozenset[int]) -> bool:
    """All operands in which it is linear together hold summands, and no other."""
    sums = [placements[0].how(axis) == "sum" for placements in q.held]
    return all(held == (i in group) for i, held in enumerate(sums)) and all(q.may_pass[i] for i in group)


def _choice(q: Question, labels: Mapping[str, Label]) -> Choice | None:
    axes: dict[str, Axes] = {}
    marks = {axis: mark for axis, (_, mark) in labels.items()}
    factors = {axis: label[0].split(JOIN) for axis, label in labels.items() if label not in (NEITHER, PASS)}
    for factor in dict.fromkeys(f for each in factors.values() for f in each):
        axes[factor] = _ordered(q, factor, [axis for axis, each in factors.items() if factor in each], marks)
        marked = any(marks[axis] != PLAIN for axis in axes[factor])
        if (marked or q.rule.shares(factor)) and not _divides(q, factor, axes[factor], marks):
            return None
        if marked and factor in q.rule.unread:  # it is looked up by the place of a rank's first element
            return None
        if not _known_before(q.rule, factor):
            return None
    passed = [axis for axis, label in labels.items() if label == PASS]
    reduced = {f: how for f, how in q.rule.reduced.items() if f in axes}

    def lies(v: Value, dims: Dims, parts: list[tuple[str, str]]) -> Placement:
        entries = [_entries(q.rule, dim, axes, marks) for dim in dims]
        splits = tuple(tuple(axis for axis, _ in dim) for dim in entries)
        marked = tuple(entry for dim in entries for entry in dim if entry[1] != PLAIN)
        return Placement(q.mesh, v.shape, splits, tuple(parts), marked)

    operands = []
    for i, (v, dims) in enumerate(zip(q.operands, q.rule.operands, strict=True)):
        parts = [(axis, "sum") for axis in passed if q.held[i][0].how(axis) == "sum"]
        if i in q.rule.addends:
            parts += [(axis, how) for f, how in reduced.items() for axis in axes[f]]
        operands.append(lies(v, dims, parts))
    results = []
    for i, (v, dims) in enumerate(zip(q.results, q.rule.results, strict=True)):
        if v is None or dims is None:
            results.append(None)
            continue
        has = {f for dim in dims for f in dim}
        there = {axis for f in has for axis in axes.get(f, ())}  # of two factors, either splits a result
        lacks = [f for f in reduced if f not in has and (i, f) not in q.rule.alike]
        parts = [(axis, reduced[f]) for f in lacks for axis in axes[f] if axis not in there]
        parts = list(dict.fromkeys(parts))  # of two factors that one axis cuts, both may be summed away
        results.append(lies(v, dims, parts + [(axis, "sum") for axis in passed]))
    return Choice(axes, tuple(operands), tuple(results), {a: m for a, m in marks.items() if m != PLAIN})


def _entries(
    rule: Factors, dim: tuple[str, ...], axes: Mapping[str, Axes], marks: Mapping[str, Mark]
) -> list[tuple[str, Mark]]:
    """The axes that split a dimension: those of the first factor it is made of, then, inside of it, those of others."""
    entries, before = [], 1
    for factor in dim:
        entries += [(axis, marks[axis].within(before)) for axis in axes.get(factor, ())]
        before *= int(rule.sizes[factor]) if len(dim) > 1 and _splits_later(dim, factor, axes) else 1
    return entries


def _known_before(rule: Factors, factor: str) -> bool:
    """Factors that stand before this one in a dimension have sizes that are numbers."""
    dims = (dim for side in rule.everywhere() for dim in side if factor in dim)
    return all(isinstance(rule.sizes.get(f), int) for dim in dims for f in dim[: dim.index(factor)])


def _splits_later(dim: tuple[str, ...], factor: str, axes: Mapping[str, Axes]) -> bool:
    return any(f in axes for f in dim[dim.index(factor) + 1 :])


def _ordered(q: Question, factor: str, axes: list[str], marks: Mapping[str, Mark]) -> Axes:
    """Axes that split one factor, as they stand where it is split already; those of fewer blocks first."""
    if len(axes) == 1:
        return (axes[0],)
    order: list[str] = []
    pinned = [(d, [p]) for d, p in zip(q.rule.results, q.pinned, strict=True) if d is not None and p is not None]
    for dims, placements in (*zip(q.rule.operands, q.held, strict=True), *pinned):
        for dim, names in enumerate(dims):
            if factor in names:
                order += [axis for p in placements for axis in p.splits[dim]]
    return tuple(sorted((a for a in dict.fromkeys([*order, *axes]) if a in axes), key=lambda a: marks[a].blocks))


def size_of(q: Question, factor: str) -> Size:
    if factor in q.rule.sizes:
        return q.rule.sizes[factor]
    both = (*zip(q.operands, q.rule.operands, strict=True), *zip(q.results, q.rule.results, strict=True))
    return next(
        v.shape[dim]
        for v, dims in both
        if v is not None and dims is not None
        for dim, names in enumerate(dims)
        if names == (factor,)
    )


def _divides(q: Question, factor: str, axes: Axes, marks: Mapping[str, Mark]) -> bool:
    size = size_of(q, factor)
    if any(marks[axis] != PLAIN for axis in axes):
        return cuts_evenly(q.mesh, size, [(axis, marks[axis]) for axis in axes])
    for axis in axes:
        small = chunk(size, q.mesh.size(axis))
        if str(small * q.mesh.size(axis)) != str(size):
            return False
        size = small
    return True


def _price(q: Question, choice: Choice) -> float:
    price = sum(q.move(i, placement) for i, placement in enumerate(choice.operands))
    for i, (v, placement) in enumerate(zip(q.results, choice.results, strict=True)):
        if v is None or placement is None:
            continue
        count = 1
        for size in placement.local_shape:
            count *= size_hint(size)
        price += LEAST * count
        if q.pinned[i] is not None:
            price += q.settle(i, placement)
            continue
        for axis, _ in placement.parts:
            ranks = q.mesh.size(axis)
            price += 2 * count * v.dtype.itemsize * (ranks - 1) / ranks
    return price
