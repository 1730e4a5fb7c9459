"""Every line of every stage, each once.

Stages repeat most of their lines, because names stay as they are from stage to stage: a stage is therefore a list of
numbers into one table of lines. A line knows the user's places it came from, its types, its kernel if it launches one,
and the lines of the region that the kernel was made of.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.ir.equation import NO_GRAD, Equation, Source, Special, recompute_region
from tessera.ir.printer import equation_lines
from tessera.ir.trace import Trace
from tessera.tools.report.kernels import Kernels


@dataclass
class Lines:
    """The table, column by column; a place is (file, line, module, note)."""

    kernels: Kernels
    text: list[str] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    kernel: list[int] = field(default_factory=list)  # -1: none
    body: list[list[int]] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    known: dict[tuple, int] = field(default_factory=dict)
    sources: dict[Source, int] = field(default_factory=dict)

    def stage(self, trace: Trace) -> list[int]:
        """The lines of a program, by number."""
        return [self._number(text, eqn) for text, eqn in equation_lines(trace)]

    def equations(self, trace: Trace) -> list[int]:
        """The line of each equation of a program; where it has several, the last."""
        numbers = {eqn: self._number(text, eqn) for text, eqn in equation_lines(trace) if eqn is not None}
        return [numbers[eqn] for eqn in trace.equations]

    def _number(self, text: str, eqn: Equation | None) -> int:
        types, places, kernel, tags, body = "", (), -1, "", ()
        if eqn is not None:
            types = ", ".join(str(v.type) for v in eqn.results())
            inner = eqn.op.body if isinstance(eqn.op, Special) else None
            places = self._places(inner.equations if inner is not None else (eqn,))
            kernel = self.kernels.number(eqn)
            again = ["recompute"] if recompute_region(eqn.tags) is not None else []
            tags = " ".join([*sorted(eqn.tags & {NO_GRAD}), *again])
            body = tuple(self._inner(inner)) if inner is not None else ()
        key = (text, types, places, kernel, tags, body)
        if key not in self.known:
            self.known[key] = len(self.text)
            self.text.append(text)
            self.types.append(types)
            self.places.append(list(places))
            self.kernel.append(kernel)
            self.body.append(list(body))
            self.tags.append(tags)
        return self.known[key]

    def _inner(self, body: Trace) -> list[int]:
        """A region's equations, without the function around them."""
        return [self._number(text, eqn) for text, eqn in equation_lines(body) if eqn is not None]

    def _places(self, equations: tuple[Equation, ...]) -> tuple[int, ...]:
        sources = dict.fromkeys(e.source for e in equations if e.source.file)
        return tuple(self.sources.setdefault(s, len(self.sources)) for s in sources)
