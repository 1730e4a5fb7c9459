"""A walk that changes where values lie, and types again what reads them.

In: a trace. A pass writes equations in place of others, whose results may lie otherwise in memory. Whatever reads such
a result is typed again: views of it, arithmetic whose result follows its layout. An operator that is not PyTorch's, has
an effect, or cannot take the layout, as some views cannot, reads a copy that lies as before; so does whoever gets the
program's results. Out: `finish()`, the new trace.
"""

from __future__ import annotations

from collections.abc import Callable

from tessera.ir.builder import emit
from tessera.ir.equation import Equation, Value
from tessera.ir.fake import fake_of
from tessera.ir.layouts import laid_as
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.verify import same_type
from tessera.torch_internals.operators import OpOverload

Rule = Callable[[], object]


class Relayout(Rewrite):
    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._before: dict[Value, Value] = {}  # values of another layout -> those that they stand for
        self._copied: set[Value] = set()  # values that have a copy of another layout and are there still

    def moved(self, eqn: Equation) -> bool:
        """Does an equation read something of another layout?"""
        return any(v in self._before for v in eqn.inputs())

    def type_again(self, eqn: Equation) -> None:
        """Write an equation over arguments of another layout."""
        known = isinstance(eqn.op, OpOverload) and eqn.op.namespace == "aten" and not has_effect(eqn)
        self.write(eqn, (lambda: emit(eqn.op, *eqn.args, **eqn.kwargs)) if known else None)

    def write(self, eqn: Equation, rule: Rule | None) -> None:
        """Write what `rule` emits in an equation's place. Without one, or where these layouts do not allow it: the
        equation itself, over arguments that lie as they did."""
        start = len(self.equations)
        results = self._emitted(eqn, rule) if rule is not None else None
        parts = self.equations[start:]
        del self.equations[start:]
        if results is None:
            with self.at(eqn):
                lying = {v: self._restored(v) for v in eqn.inputs() if v in self._before}
            self.keep(eqn.substitute(lying))
            return
        pairs = [(a, b) for a, b in zip(eqn.outputs, results, strict=True) if a is not None and b is not None]
        names = {new: old for old, new in pairs if same_type(old.type, new.type)}
        self.keep(*(part.renamed(names) for part in parts))
        for old, new in pairs:
            if new not in names:
                self.renamed[old], self._before[new] = new, old

    def copied(self, v: Value, copy: Value) -> None:
        """From here on equations read a copy of another layout; the program's results are the value itself."""
        self.renamed[v], self._before[copy] = copy, v
        self._copied.add(v)

    def finish(self, **changes: object) -> Trace:
        for old in self._copied:
            del self.renamed[old]
        for old in self.renamed.keys() & self.results:
            self.renamed[old] = self._restored(self.renamed[old])
        return super().finish(**changes)

    def _emitted(self, eqn: Equation, rule: Rule) -> list[Value | None] | None:
        """The results of a rule, where they are those of the equation but for their layout."""
        try:
            with self.at(eqn):
                results = rule()
        except RuntimeError:  # a view of what does not lie so
            return None
        listed: list[Value | None] = results if isinstance(results, list) else [results]  # type: ignore[list-item]
        if len(listed) != len(eqn.outputs):
            return None
        pairs = zip(eqn.outputs, listed, strict=True)
        alike = all(a is None or (b is not None and same_type(a.type, b.type, layout=False)) for a, b in pairs)
        return listed if alike else None

    def _restored(self, v: Value) -> Value:
        """A value in the layout that it had."""
        old = self._before.get(v)
        if old is None:
            return v
        if old in self._copied:
            return old
        return laid_as(self.builder, v, fake_of(old.tensor, self.builder.mode))
