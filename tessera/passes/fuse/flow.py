"""Who reads what in a trace whose equations are being grouped, views looked through.

`Flow` is the trace, the kind of work of every equation, and the groups as they are by now.
"""

from __future__ import annotations

from collections.abc import Iterator

from tessera.ir.equation import Equation, Special, Value
from tessera.ir.schema import has_effect, is_pointwise
from tessera.ir.trace import Trace
from tessera.passes.fuse.compiler import VIEW, Compiler
from tessera.passes.fuse.graph import Groups
from tessera.passes.memory.depend import dependencies, written
from tessera.passes.memory.writes import plan


class Flow:
    def __init__(self, trace: Trace, compiler: Compiler) -> None:
        self.trace, self.compiler = trace, compiler
        self.needs = dependencies(trace)
        self.groups = Groups(self.needs)
        self.partly = written_in_part(trace)
        self.kinds = ["" if i in self.partly else self.kind(eqn) for i, eqn in enumerate(trace.equations)]
        self.maker = trace.places()
        self._sources: dict[int, frozenset[int]] = {}
        self.readers: dict[Value, list[int]] = {}
        for i, eqn in enumerate(trace.equations):
            for v in dict.fromkeys(eqn.inputs()):
                self.readers.setdefault(v, []).append(i)
        self.escapes = {*trace.results(), *(v for v, _ in trace.symbols.values())}

    def kind(self, eqn: Equation) -> str:
        if isinstance(eqn.op, Special) or has_effect(eqn) or written(eqn):
            return ""
        return self.compiler.kind(eqn)

    def results(self, group: int) -> Iterator[Value]:
        for i in self.groups.members[group]:
            yield from self.trace.equations[i].results()

    def computes(self, i: int) -> bool:
        return self.kinds[i] not in ("", VIEW)

    def sources(self, i: int) -> frozenset[int]:
        """Computing equations that this one reads, directly or through views."""
        if i not in self._sources:
            roots = map(self.root, self.trace.equations[i].inputs())
            self._sources[i] = frozenset(j for j in roots if j is not None and self.computes(j))
        return self._sources[i]

    def root(self, v: Value) -> int | None:
        """The equation that computes what a value shows."""
        j = self.maker.get(v)
        while j is not None and self.kinds[j] == VIEW:
            j = self.maker.get(self.trace.equations[j].inputs()[0])
        return j

    def read_by(self, v: Value) -> Iterator[int]:
        """Computing equations that read a value, directly or through views."""
        for r in self.readers.get(v, ()):
            if self.kinds[r] == VIEW:
                for x in self.trace.equations[r].results():
                    yield from self.read_by(x)
            else:
                yield r

    def views_of(self, v: Value) -> list[int]:
        """Views through which a value is read."""
        views = [r for r in self.readers.get(v, ()) if self.kinds[r] == VIEW]
        return views + [j for r in views for x in self.trace.equations[r].results() for j in self.views_of(x)]

    def leaves(self, a: int, b: int) -> bool:
        """Some result of group a is needed outside of both."""
        return not all(self.stays(v, (a, b)) for v in self.results(a))

    def stays(self, v: Value, groups: tuple[int, int]) -> bool:
        """Only these groups read a value, directly or through views."""
        return v not in self.escapes and all(
            self.groups.of[r] in groups
            or (self.kinds[r] == VIEW and all(self.stays(x, groups) for x in self.trace.equations[r].results()))
            for r in self.readers.get(v, ())
        )

    def views_between(self, a: int, b: int) -> set[int]:
        """Views through which group b reads what group a computes."""
        views: set[int] = set()
        for i in self.groups.members[b]:
            for v in self.trace.equations[i].inputs():
                chain: list[int] = []
                j = self.maker.get(v)
                while j is not None and self.kinds[j] == VIEW and self.groups.of[j] not in (a, b):
                    chain.append(j)
                    j = self.maker.get(self.trace.equations[j].inputs()[0])
                if j is not None and self.groups.of[j] in (a, b):
                    views.update(chain)
        return views

    def body(self, members: list[int]) -> Trace:
        reads, outputs = self.ends(members)
        equations = tuple(self.trace.equations[i] for i in members)
        symbols = {s: where for s, where in self.trace.symbols.items() if where[0] in reads}
        return Trace("region", tuple(reads), equations, tuple(outputs), {}, {}, symbols)

    def touched(self, i: int) -> int:
        """Values that an equation reads and gives."""
        eqn = self.trace.equations[i]
        return len(eqn.inputs()) + len(eqn.outputs)

    def ends(self, members: list[int]) -> tuple[dict[Value, None], list[Value]]:
        """What some equations together read, and what others need of them."""
        inside = set(members)
        reads: dict[Value, None] = {}
        outputs: list[Value] = []
        for i in members:
            eqn = self.trace.equations[i]
            for v in eqn.inputs():
                if self.maker.get(v) not in inside:
                    reads[v] = None
            for v in eqn.outputs:
                if v is not None and (v in self.escapes or not inside.issuperset(self.readers.get(v, ()))):
                    outputs.append(v)
        return reads, outputs

    def before(self, i: int, members: set[int]) -> set[int]:
        """Members that an equation needs, directly or not."""
        before: set[int] = set()
        stack = [i]
        while stack:
            new = (set(self.needs[stack.pop()]) & members) - before
            before |= new
            stack += new
        return before


def written_in_part(trace: Trace) -> set[int]:
    """Equations of updates that write a part of an input in place: a kernel would write all of it anew."""
    index = trace.places()
    partly: set[int] = set()
    for update in plan(trace):
        if any(leaf.path or not is_pointwise(leaf.op) for leaf in update.leaves):
            partly |= {index[v] for v in update.shows if v in index} | {leaf.index for leaf in update.leaves}
    return partly
