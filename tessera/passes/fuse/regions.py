"""Chooses which equations of a trace are worth computing in one kernel.

In: a trace, and a compiler that says what kind of work an equation is and whether a set of equations makes one
kernel. Out: convex regions, and for every equation outside of them the reason. Groups grow from producers to
consumers and between readers of the same memory, where that saves moving bytes: a value that one kernel writes and
the next reads, an input that two kernels read. They do not grow where a kernel would lose the parallelism it has
(into sums over the outer dimensions), compute something expensive again, or hold too many buffers. A kernel that
reduces along its rows may sum over the rows beside that (it *walks*), if the compiler has such kernels. What is
computed from such sums, an optimizer's update say, is small and waits until the sums that read the same are together.
Small groups that read parts of one value, such as rows that a loop takes one by one, are one kernel: a launch is dear.
`products` says what a matrix product takes along.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

from tessera.ir.equation import Equation, Value
from tessera.ir.trace import Trace
from tessera.ir.types import size_hint
from tessera.ops.families import same_shape
from tessera.ops.op import bytes_moved
from tessera.passes.fuse.compiler import (
    CONTRACT,
    POINTWISE,
    REDUCE,
    SCAN,
    SELECT,
    SOURCE,
    VIEW,
    Compiler,
    Work,
    innermost,
    is_outer,
    turns,
    widens,
)
from tessera.passes.fuse.flow import Flow
from tessera.passes.fuse.products import SLACK, Products
from tessera.passes.fuse.repeats import shortened
from tessera.util.names import names

JOINS = names("cat concat stack constant_pad_nd")
MOST_BUFFERS, MOST_EQUATIONS = 24, 96
AGAIN = 1.3  # how much dearer a kernel may get by computing something again, beside SLACK
FEW = 8  # points of something large, for each of something small, from which on that may be computed apart
MANY = 64  # instructions a point, of what is dear
REPEATED = 1 << 27  # instructions, over all points, that take a GPU longer than a launch
OTHERS_FIRST = "other sums over outer dimensions that read the same come first"
SMALL = 1 << 12  # points that are computed in less time than a launch takes, on any machine
SHORT_ROW = 1 << 13  # elements of an only row that one program reduces beside what is made of it


_regions: WeakKeyDictionary[Trace, tuple[Compiler, list[list[int]]]] = WeakKeyDictionary()


def fuse(trace: Trace, compiler: Compiler) -> list[list[int]]:
    """Regions of at least two computing equations, in order; remembered, for several stages ask about one trace."""
    known = _regions.get(trace)
    if known is None or known[0] is not compiler:
        known = _regions[trace] = compiler, _fused(trace, compiler)
    return [list(region) for region in known[1]]


def _fused(trace: Trace, compiler: Compiler) -> list[list[int]]:
    """Of a program that repeats itself, a few repeats tell how all are fused."""
    short = shortened(trace)
    regions = None if short is None else short.extended(_fused(short.trace, compiler))
    return _Fusion(trace, compiler).run() if regions is None else regions


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
        self.trace, self.compiler, self.flow = trace, compiler, Flow(trace, compiler)
        self.groups, self.kinds = self.flow.groups, self.flow.kinds
        self.work: dict[int, Work] = {}
        self.products = Products(self.flow, compiler, self.work, self._count)
        self.refused: dict[int, str] = dict.fromkeys(self.flow.partly, "it writes part of an input in place")
        self.turning = {i for i, eqn in enumerate(trace.equations) if turns(eqn)}
        self.late = False  # whatever fits better has been merged

    def alone(self, i: int) -> str:
        return "a view moves nothing" if self.kinds[i] == VIEW else "nothing to fuse it with"

    def run(self) -> list[list[int]]:
        for i, eqn in enumerate(self.trace.equations):
            if self.flow.computes(i):
                self.work[i] = self._work(i, eqn)
                self._follow(i)
        self._merge_edges()
        self._merge_readers()
        self.late = True
        self._merge_edges()
        self._merge_parts()
        self._sink_casts()
        self._sink_from_windows()
        return list(self._regions())

    def _work(self, i: int, eqn: Equation) -> Work:
        read = [] if self.kinds[i] in (SELECT, SOURCE) else eqn.inputs()
        points = max(v.numel() for v in (*read, *eqn.results()))
        if self.kinds[i] == CONTRACT:
            points = eqn.results()[0].numel()
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
        sources = self.flow.sources(i)
        most = sources if len(sources) < 2 else sorted(sources, key=lambda j: -bytes_moved(self.trace.equations[j]))
        for j in most:
            self._try(self.groups.of[j], self.groups.of[i])

    def _merge_edges(self) -> None:
        """Whole groups into their readers: what was too small or of another shape when its equation came by."""
        changed = True
        while changed:
            changed = False
            for i in range(len(self.trace.equations)):
                if self.flow.computes(i):
                    for j in self.flow.sources(i):
                        changed |= self._try(self.groups.of[j], self.groups.of[i])

    def _merge_readers(self) -> None:
        """Groups over the same points that read the same large value."""
        for v, readers in self.flow.readers.items():
            seen: list[int] = []
            points = v.numel()
            for i in readers:
                if not self.flow.computes(i) or self.work[self.groups.of[i]].points != points:
                    continue
                g = self.groups.of[i]
                for other in seen:
                    if self.groups.of[other] != g and self._alike(points, self.groups.of[other], g):
                        self._try(self.groups.of[other], g, beside=True)
                        g = self.groups.of[i]
                seen.append(i)

    def _merge_parts(self) -> None:
        """Small groups that read parts of one value: a launch takes longer than what any of them computes."""
        for v in self.flow.readers:
            if (maker := self.flow.maker.get(v)) is not None and self.kinds[maker] == VIEW:
                continue
            open_: dict[int, int] = {}  # number of points -> an equation of the group that takes others in
            for i in filter(self.flow.computes, self.flow.read_by(v)):
                work = self.work[self.groups.of[i]]
                if work.points > SMALL or work.reduces or work.products:
                    continue
                one, two = self.groups.of[open_.setdefault(work.points, i)], self.groups.of[i]
                if one != two and not self._try(one, two, beside=True):
                    open_[work.points] = i

    def _alike(self, points: int, a: int, b: int) -> bool:
        one, two = self.work[a], self.work[b]
        same = (one.rows == two.rows and one.outer == two.outer) or one.walks_with(two) or two.walks_with(one)
        return points == one.points == two.points and same

    def _sink_casts(self) -> None:
        """Widening casts into the only group that reads them: what lies between the two is then the narrower."""
        for i, eqn in enumerate(self.trace.equations):
            if not self.flow.computes(i) or not widens(eqn):
                continue
            source, own = self.flow.maker.get(eqn.inputs()[0]), self.groups.of[i]
            views = self.flow.views_of(eqn.out)
            shown = {eqn.out, *(v for j in views for v in self.trace.equations[j].results())}
            readers = {self.groups.of[r] for r in self.flow.read_by(eqn.out)}
            if source is None or self.groups.of[source] != own or len(readers) != 1 or own in readers:
                continue
            (group,) = readers
            if group not in self.work or not self.flow.escapes.isdisjoint(shown):
                continue
            sunk = {i, *views} - {*self.groups.members[group]}
            if not self._check(sorted([*self.groups.members[group], *sunk]))[1]:
                for j in sunk:
                    self.groups.move(j, group)

    def _sink_from_windows(self) -> None:
        """Arithmetic behind overlapping windows into the reduction that alone reads it, where fewer bytes lie between
        the two then: nothing that reduces is merged with windows, but what comes before it was."""
        windows = {self.groups.of[i] for i, eqn in enumerate(self.trace.equations) if self.compiler.rereads(eqn)}
        for a in sorted(windows & self.work.keys()):
            readers = {self.groups.of[r] for v in self.flow.results(a) for r in self.flow.read_by(v)}
            for b in sorted(g for g in readers - {a} if g in self.work and not self.work[g].products):
                sunk = self._private(a, b)
                reads = self.flow.ends(self.groups.members[b])[0]
                after = self.flow.ends(sorted([*self.groups.members[b], *sunk]))[0]
                written = self.flow.ends(self.groups.members[a])[1]
                more = sum(v.nbytes() for v in after if v not in reads)
                more += sum(v.nbytes() for v in after if v not in written and self._made_in(v, a))
                saves = more < 2 * sum(v.nbytes() for v in reads if v not in after)
                if saves and not self._check(sorted([*self.groups.members[b], *sunk]))[1]:
                    for i in sunk:
                        self.groups.move(i, b)

    def _private(self, a: int, b: int) -> list[int]:
        """Cheap equations of group a, and views of them, that only lead to group b."""
        inside = {*self.groups.members[b]}
        views = (j for v in self.flow.results(a) for j in self.flow.views_of(v))
        for i in sorted({*self.groups.members[a], *views} - inside, reverse=True):
            eqn = self.trace.equations[i]
            cheap = self.kinds[i] == VIEW or (self.kinds[i] == POINTWISE and not self.compiler.expensive(eqn))
            results = eqn.results()
            read = [r for v in results for r in self.flow.readers.get(v, ())]
            if cheap and read and inside.issuperset(read) and self.flow.escapes.isdisjoint(results):
                inside.add(i)
        return sorted(inside.difference(self.groups.members[b]))

    def _made_in(self, v: Value, group: int) -> bool:
        maker = self.flow.maker.get(v)
        return maker is not None and self.groups.of[maker] == group

    # --- one merge ---

    def _try(self, a: int, b: int, beside: bool = False) -> bool:
        """Make one group of a producer's and a consumer's, or of two that read the same, if that pays and holds."""
        if a == b:
            return False
        between = set() if beside else self.flow.views_between(a, b)
        chosen = {a, b, *(self.groups.of[i] for i in between)}
        members = sorted(i for g in chosen for i in self.groups.members[g])
        merged, why = self._merged(a, b, members, beside)
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

    def _count(self, group: int) -> float:
        """The same for one equation too, which costs nothing where it is weighed against what it is merged with."""
        return self._cost(group) or self._check(self.groups.members[group])[0]

    def _plain(self, a: int, b: int) -> bool:
        """One pointwise equation after a group that computes a value of its shape: nothing can go wrong there."""
        one = self.work[a]
        if self.groups.members[b] != [b] or self.kinds[b] != POINTWISE or one.outer or one.walks or one.products:
            return False
        eqn = self.trace.equations[b]
        out = eqn.results()[0]
        if len(eqn.results()) != 1 or self.work[a].points != self.work[b].points:
            return False
        read = [v for v in eqn.inputs() if (j := self.flow.root(v)) is not None and self.groups.of[j] == a]
        direct = all(self.groups.of[self.flow.maker[v]] == a and v.ndim == out.ndim for v in read)
        return direct and any(same_shape(v.shape, out.shape) for v in read)

    def _merged(self, a: int, b: int, members: list[int], beside: bool) -> tuple[Work, str]:
        """What the two would compute over together, and why they should not."""
        one, two = self.work[a], self.work[b]
        merged = Work(max(one.points, two.points), min(one.rows, two.rows), one.outer or two.outer)
        both_ways = one.walks_with(two) or two.walks_with(one)
        if both_ways:
            merged = Work(one.points, two.rows if one.outer else one.rows, walks=True)
        merged.walks |= one.walks or two.walks
        merged.runs = one.runs or two.runs
        if len(members) > MOST_EQUATIONS or self._many_buffers(members):
            return merged, "the kernel would be too large"
        if (one.reduces or two.reduces) and not self.turning.isdisjoint(members):
            return merged, "a copy that turns rows into columns is written in tiles, not along rows"
        if one.products or two.products:
            points = (two if two.products else one).points
            merged = Work(points, points, products=(*one.products, *two.products))
            return merged, self.products.refusal(a, b, set(members), beside)
        windows = [i for i in members if self.compiler.rereads(self.trace.equations[i])]
        if windows and (one.reduces or two.reduces):
            return merged, "windows that overlap are read once, not at every walk along a row"
        if any(not self.flow.sources(i).isdisjoint(members) for i in windows):
            return merged, "its neighbour reads every point several times"
        if beside or both_ways:
            return merged, ""
        private = not self.flow.leaves(a, b)
        if one.points != two.points:
            if one.reduces and two.points == one.rows and not two.reduces:  # after a reduction, over its rows
                if one.outer and not self.late:
                    return merged, OTHERS_FIRST
                return one.space(), ""
            if one.walks and two.points == one.columns and not two.reduces:  # after a sum over the rows
                if not self.late:
                    return merged, OTHERS_FIRST
                return Work(one.points, one.rows, walks=True), ""
            if two.reduces and one.points == two.rows and not one.reduces:  # before one, over its rows
                return two.space(), ""
            if one.reduces or not private:
                return merged, "its neighbours have other sizes"
            if self._repeats(a, b):
                return merged, "every point of its neighbour would compute it again"
            if any(map(self.compiler.once, self._equations(a))) and self._along_rows(a, b):
                return merged, "it would be computed again at every point"
            if any(self.compiler.once(self.trace.equations[i]) for i in windows) and self._joined(a, b):
                return merged, "its windows would be read at every point of what it is joined with"
            # something small, computed beside what needs it, or large, of which only a part is needed
            return two.space(), ""
        if one.reduces and two.reduces and one.rows != two.rows:
            return merged, "its neighbours reduce other dimensions"
        first = one.outer and not (one.runs or one.rows == two.points)
        if first and (not two.outer or self._stored_after_sums(a, b)):
            return merged, "it needs the whole of a sum over outer dimensions first"
        if two.outer and not one.outer and not private and not (self.late and self._writes(b)):
            return merged, "a sum over outer dimensions has too few rows to write its argument too"
        return merged, ""

    def _repeats(self, a: int, b: int) -> bool:
        """Every point of something large would compute something small and dear. Written once, that stays in caches."""
        one, two = self.work[a], self.work[b]
        if two.reduces or one.points * FEW > two.points or two.points < REPEATED // MANY:
            return False
        return self._count(a) * two.points > REPEATED

    def _equations(self, group: int) -> list[Equation]:
        return [self.trace.equations[i] for i in self.groups.members[group]]

    def _along_rows(self, a: int, b: int) -> bool:
        """Whether something small of group a runs along the rows of its readers in group b: then every point has a
        value of its own, which no loop around the points of a row computes."""
        small = self.work[a].points
        readers = [i for i in self.groups.members[b] if any(self.groups.of[j] == a for j in self.flow.sources(i))]
        results = [v.tensor for i in readers for v in self.trace.equations[i].results()]
        return any(size_hint(t.shape[d]) == small < t.numel() for t in results for d in innermost(t))

    def _joined(self, a: int, b: int) -> bool:
        """Whether group b puts group a beside something: a kernel computes all pieces at every point, and chooses."""
        joins = [i for i in self.groups.members[b] if self.trace.equations[i].opname in JOINS]
        return any(self.groups.of[j] == a for i in joins for j in self.flow.sources(i))

    def _stored_after_sums(self, a: int, b: int) -> bool:
        """Whether group b gives something, point by point, that waits for a sum of group a."""
        late = {i for i in self.groups.members[a] if self.kinds[i] == REDUCE}
        points = self.work[b].points
        for i in sorted((*self.groups.members[a], *self.groups.members[b])):
            if not late.isdisjoint(self.flow.sources(i)):
                late.add(i)
                results = [v for v in self.trace.equations[i].results() if v.numel() == points]
                if self.kinds[i] == POINTWISE and any(not self.flow.stays(v, (a, b)) for v in results):
                    return True
        return False

    def _writes(self, group: int) -> bool:
        """Sums over outer dimensions that have enough programs to write what they sum as well."""
        sums = [i for i in self.groups.members[group] if self.kinds[i] == REDUCE]
        return all(self.compiler.writes(self.trace.equations[i]) for i in sums)

    def _many_buffers(self, members: list[int]) -> bool:
        if sum(map(self.flow.touched, members)) <= MOST_BUFFERS:  # at most so many, if each were a buffer
            return False
        return sum(map(len, self.flow.ends(members))) > MOST_BUFFERS

    def _check(self, members: list[int]) -> tuple[float, str]:
        return self.compiler.check(self.flow.body(members))

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
