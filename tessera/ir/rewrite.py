"""One walk over a trace that writes another.

In: a trace. A pass goes through the equations in order. Each already reads what stands for its arguments by now. The
pass may write others in its place, say which value stands for a result, erase it, or copy equations before it; an
equation that it leaves alone stays. Out: `finish()`, the new trace, or the old one where nothing changed.

    rewrite = Rewrite(trace)
    for eqn in rewrite:
        if is_double_negation(eqn):
            rewrite.rename(eqn.out, inner)
        elif is_square(eqn):
            rewrite.replace(eqn, lambda eqn: aten.mul(eqn.args[0], eqn.args[0]))
    return rewrite.finish()

Results that are written anew keep their names and their types. What is emitted has the source and the tags of the
equation it stands for, under names that nothing else has.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tessera.ir.builder import Builder
from tessera.ir.equation import Arg, Equation, Value, substitute
from tessera.ir.trace import Trace
from tessera.ir.verify import same_type

Results = Sequence[Value | None] | Value | None
Rule = Callable[[Equation], Results]


class Rewrite:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.renamed: dict[Value, Value] = {}  # value -> what stands for it
        self._handled = False  # the equation of the walk is dealt with

    @functools.cached_property
    def builder(self) -> Builder:
        return Builder.over(self.trace)

    @property
    def equations(self) -> list[Equation]:
        """What is written so far."""
        return self.builder.equations

    # --- the trace as it came ---

    @functools.cached_property
    def makers(self) -> dict[Value, Equation]:
        return self.trace.makers()

    @functools.cached_property
    def users(self) -> dict[Value, list[Equation]]:
        return self.trace.users()

    @functools.cached_property
    def results(self) -> set[Value]:
        """Values that the program needs at its end, or that bind a size."""
        return {*self.trace.results(), *(v for v, _ in self.trace.symbols.values())}

    def maker(self, v: Arg, *names: str) -> Equation | None:
        """The equation that makes a value, if its operator has one of these names."""
        return maker_of(self.makers, v, *names)

    def reader(self, v: Value) -> Equation | None:
        """The only equation that wants a value."""
        users = self.users.get(v, ())
        return users[0] if len(users) == 1 and v not in self.results else None

    # --- the walk ---

    def __iter__(self) -> Iterator[Equation]:
        for eqn in self.trace.equations:
            self._handled = False
            eqn = self.current(eqn)
            yield eqn
            if not self._handled:
                self.equations.append(eqn)

    def current(self, eqn: Equation) -> Equation:
        """The equation, reading what stands for its arguments."""
        if self.renamed and any(v in self.renamed for v in eqn.inputs()):
            return eqn.substitute(self.renamed)
        return eqn

    def keep(self, *equations: Equation) -> None:
        """Write finished equations now; the walk does not add its own."""
        self._handled = True
        self.equations.extend(equations)

    def erase(self) -> None:
        """Leave the equation of the walk out."""
        self._handled = True

    def rename(self, old: Value, new: Value) -> None:
        """From here on `new` stands for `old`, whose equation is left out."""
        self._handled = True
        self.renamed[old] = new

    def replace(self, eqn: Equation, rule: Rule, results: Sequence[Value | None] | None = None) -> bool:
        """Write what `rule` emits in place of an equation; False where `parts` gives none."""
        parts = self.parts(eqn, rule, results)
        if parts is None:
            return False
        self.keep(*parts)
        return True

    def parts(self, eqn: Equation, rule: Rule, results: Sequence[Value | None] | None = None) -> list[Equation] | None:
        """What `rule` emits in an equation's place, not yet written. What it gives takes the names of `results`, which
        are the equation's own unless given. None where it gives None, or a result of another type."""
        start = len(self.equations)
        try:
            with self.at(eqn):
                replacement = rule(eqn)
            parts = self.equations[start:]
        finally:
            del self.equations[start:]
        if replacement is None:
            return None
        listed = [replacement] if isinstance(replacement, Value) else replacement
        return named(parts, eqn.outputs if results is None else results, listed)

    @contextmanager
    def at(self, eqn: Equation) -> Iterator[Builder]:
        """`aten.…` emits here, with the source and tags of an equation."""
        with self.builder, self.builder.at(eqn):
            yield self.builder

    def copy(self, eqn: Equation, reads: dict[Value, Value] | None = None) -> Equation:
        """Write an equation once more, over other values where `reads` has them, under fresh names."""
        outputs = tuple(None if v is None else self.builder.value(v.name, v.type) for v in eqn.outputs)
        copied = (eqn.substitute(reads) if reads else eqn).with_(outputs=outputs)
        self.equations.append(copied)
        return copied

    # --- the end ---

    def finish(self, **changes: object) -> Trace:
        """The new trace: outputs, mutations and symbols under their new names, with constants that were added."""
        same = len(self.equations) == len(self.trace.equations) and all(
            map(operator.is_, self.equations, self.trace.equations)
        )
        if same and not self.renamed and not changes:
            return self.trace
        rewritten = with_equations(self.trace, self.equations, self.renamed)
        return rewritten.with_(constants=self.builder.constants, **changes)


def maker_of(makers: Mapping[Value, Equation], v: Arg, *names: str) -> Equation | None:
    """The equation that makes a value, if its operator has one of these names."""
    eqn = makers.get(v) if isinstance(v, Value) else None
    return eqn if eqn is not None and eqn.opname in names else None


def replace_each(trace: Trace, wanted: Callable[[Equation], bool], rule: Rule) -> Trace:
    """The trace with a rule's equations in place of every equation that is wanted; itself where none is."""
    chosen = {eqn for eqn in trace.equations if wanted(eqn)}
    if not chosen:
        return trace
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        if eqn in chosen:
            rewrite.replace(eqn, rule)
    return rewrite.finish()


def named(
    parts: Sequence[Equation], outputs: Sequence[Value | None], results: Sequence[Value | None]
) -> list[Equation] | None:
    """Equations with their results called as before. None where one is missing, of another type, not theirs, or there
    twice."""
    own = {v for eqn in parts for v in eqn.results()}
    names: dict[Value, Value] = {}
    for old, new in zip(outputs, results, strict=True):
        if old is None:
            continue
        if new is None or new not in own or new in names or not same_type(old.type, new.type):
            return None
        names[new] = old
    return [eqn.renamed(names) for eqn in parts]


def with_equations(trace: Trace, equations: Sequence[Equation], renamed: dict[Value, Value]) -> Trace:
    """The trace with other equations; outputs, mutations and symbols go by their new names. Symbols whose value is gone
    go too."""

    there = {*trace.inputs, *trace.constants, *(v for eqn in equations for v in eqn.outputs)}
    symbols = {s: (renamed.get(v, v), dim) for s, (v, dim) in trace.symbols.items()}
    return trace.with_(
        equations=tuple(equations),
        outputs=substitute(trace.outputs, renamed),
        mutations={target: renamed.get(v, v) for target, v in trace.mutations.items()},
        symbols={s: where for s, where in symbols.items() if where[0] in there},
    )


def needed(equations: Iterable[Equation], wanted: Iterable[Value]) -> list[Equation]:
    """The equations that lead to some values, in order."""
    live = set(wanted)
    kept: list[Equation] = []
    for eqn in reversed(list(equations)):
        if any(v in live for v in eqn.outputs):
            kept.append(eqn)
            live.update(eqn.inputs())
    return kept[::-1]
