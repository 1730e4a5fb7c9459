"""From a region of a trace to one tile kernel, by pulling.

In: a Trace whose equations all have a lowering (`lower`), whose inputs and outputs are tensors. Out: a `Lowered`: the
kernel, what its buffers and symbols are, and the views that are made of its results outside of it. A result is asked
for at an index; its equation asks for its arguments at theirs, down to loads of the region's inputs. Nothing is
computed twice at the same index.

The kernel's axes come from the region's space (`from_trace_space`): first with one axis for every dimension, to see
every access; then with the axes joined as far as all accesses allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tessera.ir.equation import Arg, Equation, Value, values_in
from tessera.ir.formula import Formula
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_hint, size_key
from tessera.tile.dialect.build import KernelBuilder
from tessera.tile.dialect.index import name
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.from_trace.around import Around
from tessera.tile.from_trace.index import ONE, ZERO, Index, Indices, Ranges, Unlowerable, product, sizes_of, strides_of
from tessera.tile.from_trace.lower import view as lower_view
from tessera.tile.from_trace.lower.rule import DTYPES, SELECT, VIEW, Call, Rule, rule_of
from tessera.tile.from_trace.space import Axis, Space, arrange, find_space, split_axes
from tessera.tile.from_trace.values import Emit, T
from tessera.tile.rewrites.dce import dce
from tessera.tile.rewrites.one_hot import one_hot

ROUNDS = 4  # how often axes may be cut before that is given up
# Reads of a region, in all and for each operand. A cat of cats reads the innermost once for every way to it, which are
# twice as many with each.
MOST_READS, READS_EACH = 128, 8


@dataclass(frozen=True)
class Lowered(Around):
    kernel: KernelOp
    cost: float  # rough instructions a point


def lower(body: Trace, title: str = "kernel") -> Lowered:
    """The kernel of a region, or `Unlowerable` with the reason."""
    region = Region(body)
    space, looked = _explore(region)
    axes = arrange(space, looked)
    builder = KernelBuilder(title)
    for axis in axes:
        builder.axis(axis.name, axis.size, axis.reduce)
    emit = Emit(builder)
    inputs = tuple(v for v in body.inputs if v in looked.buffers)
    for v in (*inputs, *region.stored):
        emit.buffer(v, v.dtype)
    _Lowering(region, space, axes, emit).run()
    _declare_symbols(builder, emit)
    kernel = builder.finish()
    one_hot(kernel)
    dce(kernel)  # products take what was loaded as it is, not as arithmetic would hold it
    return Lowered(inputs, region.stored, tuple(builder.symbol_names), region.tail, kernel, emit.costs)


@dataclass(frozen=True)
class Checked:
    cost: float  # rough instructions a point
    sums_over_rows: bool  # it works row by row and sums over the rows as well
    row: int | None  # how long its rows are, where that is known


def check(body: Trace) -> Checked:
    """What the kernel of a region would be, without making it; raises `Unlowerable` where there is none."""
    space, emit = _explore(Region(body))
    return Checked(emit.costs, space.sums_over_rows, product([d.size for d in space.dims if d.reduce]).constant)


def _explore(region: Region) -> tuple[Space, Emit]:
    """The region's space, cut as finely as its views want, and all that is read and stored in it."""
    space = find_space(region.calls, region.stored)
    for _ in range(ROUNDS):
        emit = region.look(space)
        finer = split_axes(space, emit.looked)
        if finer is None:
            break
        space = find_space(region.calls, region.stored, finer)
    return space, emit


def _declare_symbols(builder: KernelBuilder, emit: Emit) -> None:
    """Sizes that only an offset mentions are arguments of the kernel too."""
    known = {*builder.axis_names, *emit.gathered}
    for e in (*emit.looked, *emit.stored):
        for text in sorted(e.names() - known):
            builder.symbol(text)


class Region:
    """A region's body: who makes what, what is stored, and what is a view of that."""

    def __init__(self, body: Trace) -> None:
        self.body = body
        self.calls: dict[Value, Call] = {}
        for eqn in body.equations:
            self._add(eqn)
        if body.constants:
            raise Unlowerable("a region with constants of its own")
        self.most_reads = MOST_READS + READS_EACH * sum(len(eqn.inputs()) for eqn in body.equations)
        self.tail: tuple[Equation, ...]
        self.stored: tuple[Value, ...]
        self.tail, self.stored = self._outputs()
        if not self.stored:
            raise Unlowerable("nothing that it computes is read")

    def _add(self, eqn: Equation) -> None:
        if reason := why_not(eqn):
            raise Unlowerable(reason)
        for number, v in enumerate(eqn.outputs):
            if v is not None:
                self.calls[v] = Call.of(eqn, number)

    def _outputs(self) -> tuple[tuple[Equation, ...], tuple[Value, ...]]:
        """An output that is a view is made outside, of what it shows: it shares memory with it, as in PyTorch."""
        stored: dict[Value, None] = {}
        tail: dict[Equation, None] = {}

        def need(v: Value) -> None:
            call = self.calls.get(v)
            if call is None:
                return
            if kind_of(call.eqn) == VIEW:
                need(call.first)
                tail.setdefault(call.eqn)
            else:
                stored.setdefault(v)

        for v in values_in(self.body.outputs):
            need(v)
        order = {e: i for i, e in enumerate(self.body.equations)}
        return tuple(sorted(tail, key=order.__getitem__)), tuple(stored)

    def look(self, space: Space) -> Emit:
        """What a kernel with one axis for every dimension would read and store."""
        emit = Emit()
        _Lowering(self, space, space.axes(), emit).run()
        return emit


def why_not(eqn: Equation) -> str:
    """Why an equation can be in no kernel; empty where it can."""
    rule = rule_of(eqn.op)
    if rule is None:
        return f"{eqn.op} has no lowering"
    for a in (*eqn.args, *eqn.kwargs.values()):
        if isinstance(a, (torch.SymFloat, torch.SymBool)) or (isinstance(a, Formula) and a.is_float):
            return f"{a} is a number known only at run time"
    for v in (*eqn.inputs(), *eqn.results()):
        if not isinstance(v.type, TensorType):
            return f"{v.name} is a number known only at run time"
        if v.type.dtype not in DTYPES or v.type.layout is not torch.strided or v.type.bits != (False, False):
            return f"{v.name} is {v.type}"
        if any(size_hint(s) == 0 for s in v.shape):
            return f"{v.name} has no elements"
    try:
        return _no_index(eqn, rule) or ("" if rule.refuses is None else rule.refuses(Call.of(eqn)))
    except Unlowerable as reason:
        return str(reason)


def _no_index(eqn: Equation, rule: Rule) -> str:
    """Asks for every symbolic size, and for how a view's sizes match; there may be no such expression."""
    symbolic = [v.tensor for v in (*eqn.inputs(), *eqn.results()) if v.tensor.is_symbolic]
    for t in symbolic:
        sizes_of(t.shape), strides_of(t.stride)
    if symbolic and rule.kind == VIEW:
        lower_view.copies(Call.of(eqn))
    return ""


def kind_of(eqn: Equation) -> str:
    """The kind of an equation's work; a reshape that has to copy is no view."""
    rule = rule_of(eqn.op)
    assert rule is not None
    return SELECT if rule.kind == VIEW and lower_view.copies(Call.of(eqn)) else rule.kind


class _Lowering:
    """One walk over the region's results. `axes` may have several reduced ones while the walk only looks."""

    def __init__(self, region: Region, space: Space, axes: list[Axis], emit: Emit) -> None:
        self.region, self.space, self.emit, self.axes = region, space, emit, axes
        self.ranges = Ranges({a.name: a.size for a in axes})
        self.reduced = tuple(a.name for a in axes if a.reduce)
        self.rows = tuple(a.name for a in axes if not a.reduce) if space.sums_over_rows else ()
        emit.axis_names = frozenset(a.name for a in axes)
        parts = {text: i for a in axes for text, i in a.parts(self.ranges).items()}
        settled = {i: _substitute(i, parts, self.ranges) for i in {i for at in space.at.values() for i in at}}
        self.place = {v: tuple(settled[i] for i in at) for v, at in space.at.items()}  # over the kernel's axes
        self.memo: dict[tuple, T] = {}
        self.conditions: tuple[T, ...] = ()

    def run(self) -> None:
        for v in self.region.stored:
            at = self.place.get(v)
            if at is None:
                raise Unlowerable(f"{v.name} has no place in the space of the region")
            x = self.read(v, at)
            self.emit.store(v, v.dtype, x, self.offset(v, at))

    def offset(self, v: Value, at: Indices) -> Index:
        total = ZERO
        for i, step in zip(at, strides_of(v.tensor.stride), strict=True):
            total = total + i * step
        return self.ranges.join(total)

    # --- what rules ask for ---

    def read(self, x: Arg, at: Indices) -> T:
        assert isinstance(x, Value)
        key = (x, at, self.conditions)
        if key not in self.memo:
            if len(self.memo) > self.region.most_reads:
                raise Unlowerable("its equations read each other at more and more places")
            call = self.region.calls.get(x)
            if call is None:
                offset = self.offset(x, at)
                self.memo[key] = self.emit.load(x, x.dtype, offset, self._mask(x, at, offset))
            else:
                rule = rule_of(call.eqn.op)
                assert rule is not None
                self.memo[key] = rule.lower(self, call, at).to(x.dtype)
        return self.memo[key]

    def _mask(self, x: Value, at: Indices, offset: Index) -> T | None:
        """Where an element is read. What lies in memory anyway, and is the same wherever a condition does not hold,
        needs none of it: so it is loaded once, whoever asks."""
        within = all(map(self.ranges.within, at, sizes_of(x.shape)))
        mask: T | None = None
        for c in self.conditions:
            if not within or c.axes & offset.names():
                mask = c if mask is None else mask & c
        return mask

    def under(self, condition: T) -> _Lowering:
        """Reads hold only where the condition does: elsewhere they touch no memory."""
        return self if condition in self.conditions else self._with((*self.conditions, condition))

    def along(self, source: Value, dims: list[int], at: Indices) -> tuple[_Lowering, Indices]:
        """The index at which the reduced dimensions run over the reduced axis, and a reader for what is there."""
        if product([sizes_of(source.shape)[d] for d in dims]) == ONE:
            return self, tuple(ZERO if d in dims else i for d, i in enumerate(at))
        place = self.place.get(source)
        if place is None:
            raise Unlowerable(f"{source.name} is reduced outside of the region's space")
        if self._reduces_rows(source, dims):
            return self._over_rows(source, dims, at, place)
        reduced = frozenset(self.reduced)
        index = tuple(place[d] if d in dims else i for d, i in enumerate(at))
        for d, i in enumerate(index):
            if d not in dims and i.names() & reduced:
                raise Unlowerable(f"{source.name} is reduced once for every step of another reduction")
        self._check_reduced(source, dims, place)
        if all(index[d] == place[d] for d in range(len(place))):  # in the region's own space everything is there
            return self._with(()), index
        kept = tuple(c for c in self.conditions if not c.axes & reduced)
        if any(c.axes & reduced and not c.axes <= reduced for c in self.conditions):
            raise Unlowerable("a reduction under a condition that varies along the reduced axis")
        return self._with(kept), index

    def _reduces_rows(self, source: Value, dims: list[int]) -> bool:
        """Whether these dimensions run over all rows of a kernel that reduces along its rows."""
        place = self.place.get(source)
        if place is None or not self.rows:
            return False
        return bool(self._axes_along(place, dims) & frozenset(self.rows))

    def _axes_along(self, place: Indices, dims: list[int]) -> frozenset[str]:
        """The axes that run along these dimensions; a symbolic size that an axis is divided by is none."""
        return frozenset().union(*(place[d].names() for d in dims)) & {a.name for a in self.axes}

    def _over_rows(self, source: Value, dims: list[int], at: Indices, place: Indices) -> tuple[_Lowering, Indices]:
        rows = frozenset(self.rows)
        used = self._axes_along(place, dims)
        many = product([sizes_of(source.shape)[d] for d in dims])
        if used != rows or many != product([a.size for a in self.axes if not a.reduce]):
            raise Unlowerable(f"{source.name} is summed over some of the rows only")
        if self.conditions or any(i != place[d] for d, i in enumerate(at) if d not in dims):
            raise Unlowerable(f"the sum of {source.name} over the rows is read elsewhere than where it is computed")
        return self, place

    def _with(self, conditions: tuple[T, ...]) -> _Lowering:
        inner = object.__new__(_Lowering)
        inner.__dict__.update(self.__dict__)
        inner.conditions = conditions
        return inner

    def _check_reduced(self, source: Value, dims: list[int], place: Indices) -> None:
        """These dimensions, and no others, run over all of the reduced axis."""
        reduced = frozenset(self.reduced)
        used = self._axes_along(place, dims)
        many = product([sizes_of(source.shape)[d] for d in dims])
        all_of_it = product([a.size for a in self.axes if a.reduce])
        if used - reduced or (used and many != all_of_it) or (not used and many != ONE):
            raise Unlowerable(f"{source.name} is reduced along other dimensions than the rest of the region")

    def combine(self, kind: str, x: T, source: Value, dims: list[int]) -> T:
        many = product([sizes_of(source.shape)[d] for d in dims])
        if kind.startswith("arg"):
            return self._position(kind, x, source, dims)
        if many == ONE:
            return _from_zero(x) if kind == "sum" else x
        along = self.rows if self._reduces_rows(source, dims) else self.reduced
        if along is self.rows and (not x.axes >= {*self.reduced, *self.rows} or x.dtype.itemsize < 4):
            raise Unlowerable(f"{source.name}, summed over the rows, is no plain row of numbers")
        if not x.axes & set(along):
            return self._repeated(kind, x, many)
        return self.emit.reduce(kind, x, [a for a in along if a in x.axes])

    def _position(self, kind: str, x: T, source: Value, dims: list[int]) -> T:
        alone = product([sizes_of(source.shape)[d] for d in dims]) == ONE
        if alone or not x.axes & set(self.reduced):
            return self.emit.constant(0, x.emit.iota(ZERO).dtype)
        if len(self.reduced) > 1:  # only looking
            return self.emit.reduce(kind, x, list(self.reduced))
        place = self.place.get(source)
        if place is None:
            raise Unlowerable("the position of an extreme of something computed on the way")
        flat = self.ranges.flatten([place[d] for d in dims], [sizes_of(source.shape)[d] for d in dims])
        if flat != name(self.reduced[0]):
            raise Unlowerable("the position of an extreme along dimensions that are not walked in order")
        return self.emit.reduce(kind, x, self.reduced)

    def _repeated(self, kind: str, x: T, many: Index) -> T:
        """A reduction of something that is the same everywhere along the reduced axis."""
        if kind == "sum":
            count = x.like(many.constant) if many.constant is not None else self.emit.iota(many).to(x.dtype)
            return _from_zero(x * count)
        if kind == "prod":
            raise Unlowerable("a product of equal elements")
        return x

    def depth(self, out: Value, at: Indices, size: Index) -> Index:
        """The reduced axis, for a product that is read at this index."""
        if self.conditions:
            raise Unlowerable(f"{out.name} is a product read only where a condition holds")
        if self.place.get(out) != at:
            raise Unlowerable(f"{out.name} is a product read elsewhere than where it is computed")
        total = product([a.size for a in self.axes if a.reduce])
        if len(self.reduced) != 1 or total != size:
            raise Unlowerable(f"{out.name} sums over {size} products, the rest of the region over {total}")
        return name(self.reduced[0])

    def contract(self, lhs: T, rhs: T) -> T:
        axis = self.reduced[0]
        if axis not in lhs.axes or axis not in rhs.axes:
            raise Unlowerable("a product of something that is the same along what it sums over")
        return self.emit.contract(lhs, rhs, axis)

    def running(self, kind: str, x: T, source: Value, dim: int) -> T:
        if not self.reduced or size_key(source.tensor.shape[dim]) == 1:
            return _from_zero(x) if kind == "sum" else x
        place = self.place.get(source)
        if place is None or len(self.reduced) > 1 or place[dim] != name(self.reduced[0]):
            raise Unlowerable("a running sum along a dimension that is not walked in order")
        if self.reduced[0] not in x.axes:
            x = x + self.emit.iota(name(self.reduced[0])).to(x.dtype) * 0
        return self.emit.scan(kind, x, self.reduced[0])


def _from_zero(x: T) -> T:
    """What adding to zero gives: 0.0 where x is -0.0."""
    return x + x.like(0.0) if x.dtype.is_floating_point else x


def _substitute(e: Index, parts: dict[str, Index], ranges: Ranges) -> Index:
    """As `Index.substitute`, with divisions that know how far axes run."""
    total = ZERO
    for atoms, factor in e.terms:
        term = Index.of(factor)
        for atom in atoms:
            if hasattr(atom, "kind"):
                left, right = _substitute(atom.left, parts, ranges), _substitute(atom.right, parts, ranges)  # type: ignore[union-attr]
                term = term * (ranges.div(left, right) if atom.kind == "//" else ranges.mod(left, right))  # type: ignore[union-attr]
            else:
                term = term * parts.get(atom.name, Index((((atom,), 1),)))  # type: ignore[union-attr]
        total = total + term
    return ranges.join(total)
