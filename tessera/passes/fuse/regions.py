"""Chooses which equations of a trace are worth computing in one kernel.

In: a trace, and a compiler that says what kind of work an equation is and whether a set of equations makes one
kernel. Out: convex regions, and for every equation outside of them the reason. Groups grow from producers to
consumers and between readers of the same memory, where that saves moving bytes: a value that one kernel writes and
the next reads, an input that two kernels read. They do not grow where a kernel would lose the parallelism it has
(into sums over the outer dimensions), compute something expensive again, or hold too many buffers. A kernel that
reduces along its rows may sum over the rows beside that (it *walks*), if the compiler has such kernels. What is
computed from such sums, an optimizer's update say, is small and waits until the sums that read the same are together.
A matrix product takes what is computed from it, point by point, into its kernel where the bytes saved are worth more
than the rate that a library's product has over ours; what is computed before it only where few tiles would compute it
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from tessera.ir.equation import Equation, Special, Value
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_hint
from tessera.ops.op import bytes_moved
from tessera.passes.fuse.graph import Groups
from tessera.passes.memory.depend import dependencies, written
from tessera.passes.memory.writes import plan

POINTWISE, VIEW, SELECT, SOURCE, REDUCE, SCAN = "pointwise", "view", "select", "source", "reduce", "scan"
CONTRACT = "contract"
MOST_BUFFERS, MOST_EQUATIONS = 24, 96
SLACK = 12.0  # instructions a point that may be computed again
AGAIN = 1.3  # and how much dearer a kernel may get by it
MOST_STEPS = 4  # of arithmetic that a reduction takes along
NARROW = 512  # columns of a product up to which its left operand may be computed on the way
OTHERS_FIRST = "other sums over outer dimensions that read the same come first"
SHORT_ROW = 1 << 13  # elements of an only row that one program reduces beside what is made of it


@dataclass(frozen=True)
class Compiler:
    """`kind(eqn)` is one of the words above, or empty with `why_not(eqn)` saying why; `reduced(eqn)` the dimensions of
    its first argument that a reduction or scan runs over; `expensive(eqn)` that it should not be computed twice;
    `check(body)` a kernel's cost a point and, where there is none, the reason; `alone(eqn)` that a kernel of this one
    equation beats the library's; `loses(products, body, saved)` why a kernel of ours around these products, which would
    move `saved` bytes less, loses to the library's (without a number they have a kernel already); `writes(eqn)` that a
    reduction of outer dimensions has programs enough to write its argument too."""

    kind: Callable[[Equation], str]
    why_not: Callable[[Equation], str]
    reduced: Callable[[Equation], list[int]]
    expensive: Callable[[Equation], bool]
    check: Callable[[Trace], tuple[float, str]]
    alone: Callable[[Equation], bool] = lambda eqn: False
    loses: Callable[[list[Equation], Trace, int | None], str] = lambda products, body, saved: ""
    writes: Callable[[Equation], bool] = lambda eqn: False


@dataclass
class Work:
    """What a group of equations computes over."""

    points: int  # of its space
    rows: int  # points that are not reduced away; the same as points where nothing is
    outer: bool = False  # reduces dimensions that are not the innermost
    walks: bool = False  # reduces the innermost, and sums over the others beside that
    runs: bool = False  # has running sums: a result at every point, ready as soon as its kernel is there
    cost: float = 0.0
    counted: bool = True  # `cost` was counted, not guessed from below
    products: tuple[int, ...] = ()  # equations that are matrix products

    @property
    def reduces(self) -> bool:
        return self.rows != self.points

    @property
    def columns(self) -> int:
        return self.points // max(self.rows, 1)

    def walks_with(self, sums: Work) -> bool:
        """This works row by row, the other sums over those rows."""
        return (
            self.reduces and not self.outer and sums.outer and self.points == sums.points and self.columns == sums.rows
        )


_regions: WeakKeyDictionary[Trace, tuple[Compiler, list[list[int]]]] = WeakKeyDictionary()


def fuse(trace: Trace, compiler: Compiler) -> list[list[int]]:
    """Regions of at least two computing equations, in order; remembered, for several stages ask about one trace."""
    known = _regions.get(trace)
    if known is None or known[0] is not compiler:
        known = _regions[trace] = compiler, _Fusion(trace, compiler).run()
    return [list(region) for region in known[1]]


def reasons(trace: Trace, compiler: Compiler) -> dict[str, str]:
    """For every equation that is in no region, by the name of its first result: why."""
    fusion = _Fusion(trace, compiler)
    inside = {i for region in fusion.run() for i in region}
    return {
        eqn.results()[0].name: compiler.why_not(eqn) or fusion.refused.get(i) or fusion.alone(i)
        for i, eqn in enumerate(trace.equations)
        if i not in inside and eqn.results()
    }


class _Fusion:
    def __init__(self, trace: Trace, compiler: Compiler) -> None:
        self.trace, self.compiler = trace, compiler
        self.needs = dependencies(trace)
        self.groups = Groups(self.needs)
        partly = written_in_part(trace)
        self.kinds = ["" if i in partly else self._kind(eqn) for i, eqn in enumerate(trace.equations)]
        self.maker = trace.places()
        self.readers: dict[Value, list[int]] = {}
        for i, eqn in enumerate(trace.equations):
            for v in dict.fromkeys(eqn.inputs()):
                self.readers.setdefault(v, []).append(i)
        self.escapes = {*trace.results(), *(v for v, _ in trace.symbols.values())}
        self.work: dict[int, Work] = {}
        self.refused: dict[int, str] = dict.fromkeys(partly, "it writes part of an input in place")
        self.late = False  # whatever fits better has been merged

    def _kind(self, eqn: Equation) -> str:
        if isinstance(eqn.op, Special) or has_effect(eqn) or written(eqn):
            return ""
        return self.compiler.kind(eqn)

    def alone(self, i: int) -> str:
        return "a view moves nothing" if self.kinds[i] == VIEW else "nothing to fuse it with"

    def computes(self, i: int) -> bool:
        return self.kinds[i] not in ("", VIEW)

    def run(self) -> list[list[int]]:
        for i, eqn in enumerate(self.trace.equations):
            if self.computes(i):
                self.work[i] = self._work(i, eqn)
                self._follow(i)
        self._merge_edges()
        self._merge_readers()
        self.late = True
        self._merge_edges()
        self._sink_casts()
        return list(self._regions())

    def _work(self, i: int, eqn: Equation) -> Work:
        points = max(_numel(v) for v in (eqn.results() if self.kinds[i] in (SELECT, SOURCE) else _tensors(eqn)))
        if self.kinds[i] == CONTRACT:
            points = _numel(eqn.results()[0])
            return Work(points, points, products=(i,))
        if self.kinds[i] not in (REDUCE, SCAN):
            return Work(points, points)
        source = eqn.inputs()[0].tensor
        dims = self.compiler.reduced(eqn)
        many = 1
        for d in dims:
            many *= size_hint(source.shape[d])
        everything = many == points > SHORT_ROW  # one long row has no more parallelism than a few columns
        outer = everything or is_outer(eqn, dims)
        return Work(points, points // max(many, 1), outer, runs=self.kinds[i] == SCAN)

    # --- growing along data flow ---

    def _follow(self, i: int) -> None:
        """Join the groups of what an equation reads, those that save most first."""
        for j in sorted(set(self._sources(i)), key=lambda j: -bytes_moved(self.trace.equations[j])):
            self._try(self.groups.of[j], self.groups.of[i])

    def _sources(self, i: int) -> Iterator[int]:
        """Computing equations that this one reads, directly or through views."""
        for v in self.trace.equations[i].inputs():
            j = self._root(v)
            if j is not None and self.computes(j):
                yield j

    def _merge_edges(self) -> None:
        """Whole groups into their readers: what was too small or of another shape when its equation came by."""
        changed = True
        while changed:
            changed = False
            for i in range(len(self.trace.equations)):
                if self.computes(i):
                    for j in set(self._sources(i)):
                        changed |= self._try(self.groups.of[j], self.groups.of[i])

    def _merge_readers(self) -> None:
        """Groups over the same points that read the same large value."""
        for v, readers in self.readers.items():
            seen: list[int] = []
            points = _numel(v)
            for i in readers:
                if not self.computes(i) or self.work[self.groups.of[i]].points != points:
                    continue
                g = self.groups.of[i]
                for other in seen:
                    if self.groups.of[other] != g and self._alike(points, self.groups.of[other], g):
                        self._try(self.groups.of[other], g, beside=True)
                        g = self.groups.of[i]
                seen.append(i)

    def _alike(self, points: int, a: int, b: int) -> bool:
        one, two = self.work[a], self.work[b]
        same = (one.rows == two.rows and one.outer == two.outer) or one.walks_with(two) or two.walks_with(one)
        return points == one.points == two.points and same

    def _sink_casts(self) -> None:
        """Widening casts into the only group that reads them: what lies between the two is then the narrower."""
        for i, eqn in enumerate(self.trace.equations):
            if not self.computes(i) or not widens(eqn) or eqn.out in self.escapes:
                continue
            source, own = self.maker.get(eqn.inputs()[0]), self.groups.of[i]
            readers = {self.groups.of[r] for r in self.readers.get(eqn.out, ())}
            if source is None or self.groups.of[source] != own or len(readers) != 1 or own in readers:
                continue
            (group,) = readers
            if group in self.work and not self._check(sorted([*self.groups.members[group], i]))[1]:
                self.groups.move(i, group)

    # --- one merge ---

    def _try(self, a: int, b: int, beside: bool = False) -> bool:
        """Make one group of a producer's and a consumer's, or of two that read the same, if that pays and holds."""
        if a == b:
            return False
        between = set() if beside else self._views_between(a, b)
        chosen = {a, b, *(self.groups.of[i] for i in between)}
        members = sorted(i for g in chosen for i in self.groups.members[g])
        merged, why = self._suits(a, b, members, beside)
        if not why and not self.groups.convex(chosen):
            why = "other work lies between it and its neighbour"
        if not why and self._plain(a, b):
            merged.cost, merged.counted = self.work[a].cost + 1, False
        elif not why:
            merged.cost, why = self._check(members)
            before = self._cost(a) + self._cost(b)
            if not why and self.work[a].cost and self.work[b].cost and merged.cost > before * AGAIN + SLACK:
                why = "its neighbour would have to be computed again for it"
        if why:
            self.refused.update(dict.fromkeys((max(self.groups.members[b]), *self.work[a].products), why))
            return False
        del self.work[a], self.work[b]
        self.work[self.groups.join(chosen)] = merged
        return True

    def _cost(self, group: int) -> float:
        """Instructions a point of a group, counted now if they were only guessed."""
        work = self.work[group]
        if not work.counted:
            work.cost, work.counted = self._check(self.groups.members[group])[0], True
        return work.cost

    def _plain(self, a: int, b: int) -> bool:
        """One pointwise equation after a group that computes a value of its shape: nothing can go wrong there."""
        one = self.work[a]
        if self.groups.members[b] != [b] or self.kinds[b] != POINTWISE or one.outer or one.walks or one.products:
            return False
        eqn = self.trace.equations[b]
        out = eqn.results()[0]
        if len(eqn.results()) != 1 or self.work[a].points != self.work[b].points:
            return False
        read = [v for v in eqn.inputs() if (j := self._root(v)) is not None and self.groups.of[j] == a]
        direct = all(self.groups.of[self.maker[v]] == a and v.ndim == out.ndim for v in read)
        return direct and any(_key(v) == _key(out) for v in read)

    def _root(self, v: Value) -> int | None:
        """The equation that computes what a value shows."""
        j = self.maker.get(v)
        while j is not None and self.kinds[j] == VIEW:
            j = self.maker.get(self.trace.equations[j].inputs()[0])
        return j

    def _suits(self, a: int, b: int, members: list[int], beside: bool) -> tuple[Work, str]:
        """What the two would compute over together, and why they should not."""
        one, two = self.work[a], self.work[b]
        merged = Work(max(one.points, two.points), min(one.rows, two.rows), one.outer or two.outer)
        both_ways = one.walks_with(two) or two.walks_with(one)
        if both_ways:
            merged = Work(one.points, two.rows if one.outer else one.rows, walks=True)
        merged.walks |= one.walks or two.walks
        merged.runs = one.runs or two.runs
        if len(members) > MOST_EQUATIONS or self._buffers(members) > MOST_BUFFERS:
            return merged, "the kernel would be too large"
        if one.products or two.products:
            points = (two if two.products else one).points
            merged = Work(points, points, products=(*one.products, *two.products))
            return merged, self._around_products(a, b, set(members), beside)
        if beside or both_ways:
            return merged, ""
        private = not self._leaves(a, b)
        if one.points != two.points:
            if one.reduces and two.points == one.rows and not two.reduces:  # after a reduction, over its rows
                if one.outer and not self.late:
                    return merged, OTHERS_FIRST
                return Work(one.points, one.rows, one.outer, one.walks, one.runs), ""
            if one.walks and two.points == one.columns and not two.reduces:  # after a sum over the rows
                if not self.late:
                    return merged, OTHERS_FIRST
                return Work(one.points, one.rows, walks=True), ""
            if two.reduces and one.points == two.rows and not one.reduces:  # before one, over its rows
                return Work(two.points, two.rows, two.outer, two.walks, two.runs), ""
            if one.reduces or not private:
                return merged, "its neighbours have other sizes"
            # something small, computed beside what needs it, or large, of which only a part is needed
            return Work(two.points, two.rows, two.outer, two.walks, two.runs), ""
        if one.reduces and two.reduces and one.rows != two.rows:
            return merged, "its neighbours reduce other dimensions"
        if one.outer and not (one.runs or two.outer or one.rows == two.points):
            return merged, "it needs the whole of a sum over outer dimensions first"
        if two.outer and not one.outer and not private and not (self.late and self._writes(b)):
            return merged, "a sum over outer dimensions has too few rows to write its argument too"
        return merged, ""

    # --- matrix products ---

    def _around_products(self, a: int, b: int, members: set[int], beside: bool) -> str:
        """Why a kernel with a matrix product should not be made of these two groups; `a` computes, `b` reads."""
        one, two = self.work[a], self.work[b]
        if one.reduces or two.reduces:
            return "a product's kernel reduces nothing else"
        if beside:
            return "its neighbour is a product with work of its own"
        products = [*one.products, *two.products]
        if len(products) > 2 or any(self._before(i, members) & {*products} for i in products):
            return "one product needs the other first"
        if len(products) == 2 and len({self.trace.equations[i].inputs()[0] for i in products}) == 2:
            return "its neighbours multiply different things"
        if any(self.groups.of[j] == a for i in two.products for j in self._sources(i)):
            if why := self._prologue(a, b):
                return why
        elif one.products and one.points != two.points:
            return "its neighbours have other sizes"
        elif not one.products and (one.points > two.points or self._leaves(a, b)):
            return "its neighbours have other sizes" if one.points > two.points else "others read it too"
        saved = self._saved(a, b)
        if saved <= 0:
            return "a kernel after it moves as little"
        body = self._body(sorted(members))
        first = all(self.groups.members[self.groups.of[i]] == [i] for i in products)
        return self.compiler.loses([self.trace.equations[i] for i in products], body, saved if first else None)

    def _before(self, i: int, members: set[int]) -> set[int]:
        """Members that an equation needs, directly or not."""
        found: set[int] = set()
        stack = [i]
        while stack:
            new = (set(self.needs[stack.pop()]) & members) - found
            found |= new
            stack += new
        return found

    def _prologue(self, a: int, b: int) -> str:
        """Group a computes an operand of b's product: every column of tiles would do it again."""
        columns = max(size_hint(self.trace.equations[i].out.shape[-1]) for i in self.work[b].products)
        if self.work[a].products or self._leaves(a, b):
            return "others read it too"
        bias = self.work[a].points <= columns
        if not bias and (columns > NARROW or self._cost(a) > SLACK):
            return "every column of tiles of the product would compute it again"
        return ""

    def _saved(self, a: int, b: int) -> int:
        """Bytes that one kernel moves less: what group a computes is not written for b and read again.

        But what b computes for a kernel after it, which could compute it itself, is then written and read."""
        saved = 0
        for i in self.groups.members[a]:
            for v in self.trace.equations[i].results():
                if any(self.groups.of[r] == b for r in self._read_by(v)):
                    saved += v.tensor.nbytes() * (2 if self._stays(v, (a, b)) else 1)
        for i in self.groups.members[b]:
            for v in self.trace.equations[i].results():
                if self._for_others(v, b):
                    written = v in self.escapes or not all(self._no_epilogue(r) for r in self._read_by(v))
                    saved -= v.tensor.nbytes() * (1 if written else 2)
        return saved

    def _read_by(self, v: Value) -> Iterator[int]:
        """Computing equations that read a value, directly or through views."""
        for r in self.readers.get(v, ()):
            if self.kinds[r] == VIEW:
                for x in self.trace.equations[r].results():
                    yield from self._read_by(x)
            else:
                yield r

    def _for_others(self, v: Value, group: int) -> bool:
        return any(self._no_epilogue(r) for r in self._read_by(v) if self.groups.of[r] != group)

    def _no_epilogue(self, i: int) -> bool:
        """What no product's kernel takes along: a reduction, arithmetic that leads straight to one, or that reads
        something else as large as its result."""
        steps = 0
        while self.kinds[i] == POINTWISE and steps < MOST_STEPS:
            eqn = self.trace.equations[i]
            least = eqn.results()[0].tensor.nbytes() / 8
            if len({v for v in eqn.inputs() if v.tensor.nbytes() > least}) > 1:
                return True
            i, steps = next(self._read_by(eqn.results()[0]), i), steps + 1
        return self.kinds[i] in (REDUCE, SCAN)

    def _writes(self, group: int) -> bool:
        """Sums over outer dimensions that have enough programs to write what they sum as well."""
        sums = [i for i in self.groups.members[group] if self.kinds[i] == REDUCE]
        return all(self.compiler.writes(self.trace.equations[i]) for i in sums)

    def _leaves(self, a: int, b: int) -> bool:
        """Some result of group a is needed outside of both."""
        members = self.groups.members[a]
        return not all(self._stays(v, (a, b)) for i in members for v in self.trace.equations[i].results())

    def _stays(self, v: Value, groups: tuple[int, int]) -> bool:
        """Only these groups read a value, directly or through views."""
        return v not in self.escapes and all(
            self.groups.of[r] in groups
            or (self.kinds[r] == VIEW and all(self._stays(x, groups) for x in self.trace.equations[r].results()))
            for r in self.readers.get(v, ())
        )

    def _views_between(self, a: int, b: int) -> set[int]:
        """Views through which group b reads what group a computes."""
        found: set[int] = set()
        for i in self.groups.members[b]:
            for v in self.trace.equations[i].inputs():
                chain: list[int] = []
                j = self.maker.get(v)
                while j is not None and self.kinds[j] == VIEW and self.groups.of[j] not in (a, b):
                    chain.append(j)
                    j = self.maker.get(self.trace.equations[j].inputs()[0])
                if j is not None and self.groups.of[j] in (a, b):
                    found.update(chain)
        return found

    def _buffers(self, members: list[int]) -> int:
        body = self._body(members)
        return len(body.inputs) + len(body.outputs)

    def _check(self, members: list[int]) -> tuple[float, str]:
        return self.compiler.check(self._body(members))

    def _body(self, members: list[int]) -> Trace:
        inside = set(members)
        equations = tuple(self.trace.equations[i] for i in members)
        made = {v for eqn in equations for v in eqn.results()}
        reads = dict.fromkeys(v for eqn in equations for v in eqn.inputs() if v not in made)
        outputs = tuple(
            v
            for eqn in equations
            for v in eqn.results()
            if v in self.escapes or any(r not in inside for r in self.readers.get(v, ()))
        )
        symbols = {s: where for s, where in self.trace.symbols.items() if where[0] in reads}
        return Trace("region", tuple(reads), equations, outputs, {}, {}, symbols)

    # --- what is left ---

    def _regions(self) -> Iterator[list[int]]:
        for _, members in sorted(self.groups.members.items()):
            computing = [i for i in members if self.kinds[i] in (POINTWISE, SELECT, REDUCE, SCAN, CONTRACT)]
            lone = len(computing) == 1 and self.compiler.alone(self.trace.equations[computing[0]])
            if len(computing) < 2 and not lone:
                continue
            _, why = self._check(members)
            if why:
                self.refused.update(dict.fromkeys(members, why))
            else:
                yield members


def written_in_part(trace: Trace) -> set[int]:
    """Equations of updates that write a part of an input in place: a kernel would write all of it anew."""
    index = trace.places()
    found: set[int] = set()
    for update in plan(trace):
        if any(leaf.path or torch.Tag.pointwise not in leaf.op.tags for leaf in update.leaves):
            found |= {index[v] for v in update.shows if v in index} | {leaf.index for leaf in update.leaves}
    return found


def widens(eqn: Equation) -> bool:
    """A cast of floats to a type of more bytes."""
    if eqn.op is not torch.ops.aten._to_copy.default or len(eqn.inputs()) != 1:
        return False
    before, after = eqn.inputs()[0].tensor, eqn.out.tensor
    same = before.device == after.device and before.stride == after.stride
    return same and before.is_float and after.is_float and before.dtype.itemsize < after.dtype.itemsize


def is_outer(eqn: Equation, dims: list[int]) -> bool:
    """Reduces dimensions that are not the innermost of its argument."""
    t = eqn.inputs()[0].tensor
    inner = [d for d in range(t.ndim) if size_hint(t.stride[d]) == 1 and size_hint(t.shape[d]) > 1]
    return bool(inner) and not set(inner) & set(dims)


def _key(v: Value) -> tuple:
    return v.type.key()[1] if isinstance(v.type, TensorType) else ()


def _tensors(eqn: Equation) -> list[Value]:
    return [v for v in (*eqn.inputs(), *eqn.results()) if isinstance(v.type, TensorType)]


def _numel(v: Value) -> int:
    return v.type.numel() if isinstance(v.type, TensorType) else 1
