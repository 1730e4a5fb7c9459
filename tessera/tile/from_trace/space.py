"""The space of a region: its dimensions, which of them are reduced, and where in it every value is computed.

The shape of what is reduced (or of the largest result) gives the dimensions. From there places spread over the
region: the results and arguments of a pointwise operator that have its shape share its place, a view that shows
every element once moves it, a reduction drops the reduced entries. Dimensions become axes: ordered by the strides
of what is stored, and joined where no access tells two of them apart.

Rows are reduced along themselves; beside that, sums over all rows make the kernel *sequential* along
them: they drop the other dimensions, and what is computed from them is only stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tessera.ir.equation import Value
from tessera.ir.types import size_hint
from tessera.tile.dialect.index import Quotient, name
from tessera.tile.from_trace.index import ONE, ZERO, Index, Indices, Ranges, Unlowerable, product, sizes_of
from tessera.tile.from_trace.lower.rule import CONTRACT, POINTWISE, REDUCE, SCAN, VIEW, Call, rule_of
from tessera.tile.from_trace.values import Emit

Cuts = dict[tuple[int, ...], Index]  # a dimension, by its path, and the size of the inner part it is cut into


@dataclass(frozen=True)
class Dim:
    path: tuple[int, ...]  # the dimension of the anchor, and which part of it after every cut
    size: Index
    reduce: bool = False

    @property
    def name(self) -> str:
        return "d" + "_".join(map(str, self.path))


@dataclass(frozen=True)
class Axis:
    """One axis of the kernel: one dimension of the space, or several joined."""

    name: str
    dims: tuple[Dim, ...]
    reduce: bool

    @property
    def size(self) -> Index:
        return product([d.size for d in self.dims])

    def parts(self, ranges: Ranges) -> dict[str, Index]:
        """The index of every dimension in terms of the axis."""
        if not self.dims:  # of size one: a kernel has at least one axis
            return {}
        if len(self.dims) == 1:
            return {self.dims[0].name: name(self.name)}
        indices = ranges.unflatten(name(self.name), [d.size for d in self.dims])
        return {d.name: i for d, i in zip(self.dims, indices, strict=True)}


@dataclass
class Space:
    dims: tuple[Dim, ...]
    cuts: Cuts = field(default_factory=dict)
    at: dict[Value, Indices] = field(default_factory=dict)  # where in the space a value is computed
    sums_over_rows: bool = False  # something is summed over all rows

    def row_names(self) -> frozenset[str]:
        return frozenset(d.name for d in self.dims if not d.reduce)

    @property
    def ranges(self) -> Ranges:
        return Ranges({d.name: d.size for d in self.dims})

    def axes(self) -> list[Axis]:
        """One axis for every dimension."""
        return [Axis(d.name, (d,), d.reduce) for d in self.dims]


def find_space(calls: dict[Value, Call], stored: Sequence[Value], cuts: Cuts | None = None) -> Space:
    reductions = [c for c in _distinct(calls) if rule_of(c.eqn.op).kind in (REDUCE, SCAN)]  # type: ignore[union-attr]
    big = [c for c in reductions if _many(c) != ONE]
    inner = [c for c in big if not is_outer(c.first, _dims(c))]
    products = [c for c in _distinct(calls) if rule_of(c.eqn.op).kind == CONTRACT]  # type: ignore[union-attr]
    if products and big:
        raise Unlowerable("a matrix product and a reduction in one kernel")
    if products:
        anchor, reduced = products[0].out, set()
    elif big:
        main = (inner or big)[0]
        anchor, reduced = main.first, set(_dims(main))
    else:
        anchor, reduced = max(stored, key=lambda v: (v.tensor.numel(), v.ndim)), set()
    space, place = _dimensions(anchor, reduced, cuts or {})
    if products:
        depth = rule_of(products[0].eqn.op).depth(products[0])  # type: ignore[union-attr,misc]
        space.dims = (*space.dims, Dim((anchor.ndim,), depth, reduce=True))
    space.at[anchor] = place
    _spread(space, calls)
    rows = [d for d in space.dims if not d.reduce]
    for v in [call.first for call in big]:
        _settle(space, calls, v, space.dims)
    for v in [call.out for call in products[1:]]:
        _settle(space, calls, v, rows)
    summed = _sums_over_rows(space, calls, big)
    for v in stored:
        _settle(space, calls, v, space.dims, rows)
        _check_place(space, v, v in summed)
    return space


def _sums_over_rows(space: Space, calls: dict[Value, Call], big: Sequence[Call]) -> set[Value]:
    """What is computed from sums over all rows, where others reduce along the rows; nothing else may need it."""
    rows, sums = space.row_names(), set()
    axes = {d.name for d in space.dims}  # a symbolic size that one is divided by is none
    for v, call in calls.items():
        if any(c.eqn is call.eqn for c in big):
            at = space.at.get(call.first, ())
            used = frozenset().union(*(i.names() for d, i in enumerate(at) if d in _dims(call))) & axes
            if used & rows:
                if used != rows or not rule_of(call.eqn.op).over_rows:  # type: ignore[union-attr]
                    raise Unlowerable(f"{v.name} reduces other dimensions than the rest of the region, and is no sum")
                sums.add(v)
                continue
        if sums & set(call.eqn.inputs()):
            if space.at.get(v) is None or any(i.names() & rows for i in space.at[v]):
                raise Unlowerable(f"{v.name} needs the whole of a sum over the rows first")
            if rule_of(call.eqn.op).kind in (REDUCE, SCAN):  # type: ignore[union-attr]
                raise Unlowerable(f"{v.name} reduces sums over the rows again")
            sums.add(v)
    space.sums_over_rows = bool(sums)
    return sums


def is_outer(source: Value, dims: Sequence[int]) -> bool:
    """These are not the innermost of the value's dimensions."""
    strides, sizes = source.tensor.stride, source.tensor.shape
    inner = [d for d in range(source.ndim) if size_hint(strides[d]) == 1 and size_hint(sizes[d]) > 1]
    return bool(inner) and not set(inner) & set(dims)


def _distinct(calls: dict[Value, Call]) -> list[Call]:
    return list({id(c.eqn): c for c in calls.values()}.values())


def _dims(call: Call) -> list[int]:
    rule = rule_of(call.eqn.op)
    assert rule is not None and rule.dims is not None
    return rule.dims(call)


def _many(call: Call) -> Index:
    return product([sizes_of(call.first.shape)[d] for d in _dims(call)])


def _dimensions(anchor: Value, reduced: set[int], cuts: Cuts) -> tuple[Space, Indices]:
    """One dimension of the space for every dimension of the anchor, or several where it is cut."""
    dims: list[Dim] = []

    def cut(path: tuple[int, ...], size: Index, reduce: bool) -> Index:
        if path in cuts:
            inner = cuts[path]
            return cut((*path, 0), size // inner, reduce) * inner + cut((*path, 1), inner, reduce)
        if size == ONE:
            return ZERO
        dims.append(Dim(path, size, reduce))
        return name(dims[-1].name)

    place = tuple(cut((d,), size, d in reduced) for d, size in enumerate(sizes_of(anchor.shape)))
    return Space(tuple(dims), cuts), place


# --- where values are computed ----------------------------------------------------------------------------


def _spread(space: Space, calls: dict[Value, Call]) -> None:
    """Places reach whatever they determine."""
    ranges = space.ranges
    changed = True
    while changed:
        before = len(space.at)
        for v, call in calls.items():
            _across(space, ranges, v, call)
        for v, call in reversed(calls.items()):
            _across(space, ranges, v, call)
        changed = len(space.at) > before


def _across(space: Space, ranges: Ranges, v: Value, call: Call) -> None:
    rule = rule_of(call.eqn.op)
    assert rule is not None
    at = space.at
    if rule.kind in (POINTWISE, SCAN):
        same = [v, *(x for x in call.eqn.inputs() if _same_shape(x, v))]
        known = next((at[x] for x in same if x in at), None)
        if known is not None:
            for x in same:
                at.setdefault(x, known)
    elif rule.kind == VIEW and rule.push is not None:
        if call.first in at:
            if v not in at:
                at[v] = rule.push(ranges, call, at[call.first])
        elif v in at:
            at[call.first] = rule.pull(ranges, call, at[v])  # type: ignore[misc]
    elif rule.kind == REDUCE and call.first in at and v not in at:
        dims = set(_dims(call))
        keeps = call.first.ndim == v.ndim and v.ndim > 0
        at[v] = tuple(ZERO if d in dims else i for d, i in enumerate(at[call.first]) if keeps or d not in dims)


def _same_shape(a: Value, b: Value) -> bool:
    if a.tensor.is_symbolic or b.tensor.is_symbolic:  # comparing symbols would guard them
        return a.ndim == b.ndim and sizes_of(a.shape) == sizes_of(b.shape)
    return a.shape == b.shape


def _settle(space: Space, calls: dict[Value, Call], v: Value, *choices: Sequence[Dim]) -> None:
    """A value that no place has reached gets one, and what that determines."""
    if v not in space.at and any(_lies_along(space, v, dims) for dims in choices):
        _spread(space, calls)


def _lies_along(space: Space, v: Value, dims: Sequence[Dim]) -> bool:
    """A value with as many elements as these dimensions: row by row."""
    shape = sizes_of(v.shape)
    if product(list(shape)) != product([d.size for d in dims]):
        return False
    try:
        space.at[v] = space.ranges.reshape([name(d.name) for d in dims], [d.size for d in dims], shape)
    except Unlowerable:
        return False
    return True


def _check_place(space: Space, v: Value, summed: bool) -> None:
    """Stored once at every point of the space, of its parallel dimensions, or, if summed over those, of the others."""
    if v not in space.at:
        raise Unlowerable(f"{v.name} has another shape than the rest of the region")
    used = frozenset().union(*(i.names() for i in space.at[v]))
    row = {d.name: d.size for d in space.dims if d.reduce}
    covers = (
        {d.name: d.size for d in space.dims},
        {d.name: d.size for d in space.dims if not d.reduce},
    )
    covers = (row,) if summed else covers
    if not any(used >= c.keys() and product(list(c.values())) == product(list(sizes_of(v.shape))) for c in covers):
        raise Unlowerable(f"{v.name} does not have one element for every point of the region")


# --- from dimensions to axes --------------------------------------------------------------------------------


def split_axes(space: Space, looked: Iterable[Index]) -> Cuts | None:
    """Cut a parallel dimension that is divided by a number: its halves are then indices themselves."""
    by_name = {d.name: d for d in space.dims}
    for e in looked:
        for q in _quotients(e):
            dim = by_name.get(str(q.left))
            if dim is None or dim.reduce or q.right.names() & by_name.keys():
                continue
            if (dim.size % q.right) == ZERO and q.right != dim.size:
                return {**space.cuts, dim.path: q.right}
    return None


def _quotients(e: Index) -> Iterable[Quotient]:
    for atoms, _ in e.terms:
        for atom in atoms:
            if isinstance(atom, Quotient):
                yield atom
                yield from _quotients(atom.left)


def arrange(space: Space, emit: Emit) -> list[Axis]:
    """The kernel's axes: parallel ones from the widest stride of what is stored to the narrowest, then one reduced
    axis, walked as memory lies. Neighbours are joined where every access steps along both as along one; a sequential
    one is all rows."""
    main = max(emit.stored, key=lambda e: len(e.names()), default=ZERO)
    rows = [d for d in space.dims if not d.reduce]
    rows.sort(key=lambda d: -_hint(main.stride(d.name)))
    reduced = [d for d in space.dims if d.reduce]
    reduced = reduced if emit.in_order else _as_memory_lies(reduced, (*emit.stored, *emit.looked))
    looked = list({*emit.looked, *emit.stored})
    joined = [tuple(rows)] if space.sums_over_rows else _joined(rows, looked)
    axes = [Axis(f"i{k}", dims, False) for k, dims in enumerate(joined)]
    if reduced:
        axes.append(Axis("r", tuple(reduced), True))
    return axes or [Axis("i0", (), False)]


def _as_memory_lies(dims: list[Dim], accesses: Sequence[Index]) -> list[Dim]:
    """Reduced dimensions from the widest stride to the narrowest of the first access that runs along all of them."""
    names = {d.name for d in dims}
    main = next((e for e in accesses if names <= e.names()), ZERO)
    strides = {d: main.stride(d.name) for d in dims}
    return dims if None in strides.values() else sorted(dims, key=lambda d: -_hint(strides[d]))


def _hint(e: Index | None) -> int:
    if e is None:
        return 1
    return e.evaluate(lambda text: 4096, int)


def _joined(dims: Sequence[Dim], looked: Sequence[Index]) -> list[tuple[Dim, ...]]:
    groups: list[tuple[Dim, ...]] = []
    for dim in dims:
        if groups and all(_steps_as_one(e, groups[-1][-1], dim) for e in looked):
            groups[-1] = (*groups[-1], dim)
        else:
            groups.append((dim,))
    return groups


def _steps_as_one(e: Index, outer: Dim, inner: Dim) -> bool:
    a, b = e.stride(outer.name), e.stride(inner.name)
    return a is not None and b is not None and a == b * inner.size
