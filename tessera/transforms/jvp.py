"""Forward-mode differentiation, from Trace to Trace.

In: a trace and which of its inputs move. Out: a trace with one more input for each of them, its tangent, whose
outputs are those of the trace and then one tangent for each (None where nothing moves). Declared rules are used
where they hold; other operators through PyTorch's own forward-mode formula. As in PyTorch, `detach` stops a
tangent and `no_grad` does not; what ran while forward mode was switched off has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.ir.builder import Builder
from tessera.ir.call import in_place
from tessera.ir.equation import NO_TANGENT, Arg, Equation, Value, substitute, values_in
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.fallback import conform, jvp_formula
from tessera.ops.families import fit
from tessera.ops.op import Rules, is_real, name_of, rules, stops
from tessera.torch_internals.fake import FakeTensorMode
from tessera.util.errors import RuleError

Tangent = Value | None


@dataclass(frozen=True)
class Pushed:
    """What a rule gives that computes results and tangents together: the equation's own results are replaced."""

    results: list[Value]
    tangents: list[Tangent]


def jvp(trace: Trace, moving: Sequence[Value], mode: FakeTensorMode | None = None) -> Trace:
    """The trace that also computes how its outputs move when the inputs `moving` do."""
    trace = in_place(trace)
    builder = Builder.over(trace, mode)
    with builder:
        return _Forward(builder, trace).run(moving)


class _Forward:
    def __init__(self, builder: Builder, trace: Trace) -> None:
        self.builder, self.trace = builder, trace
        self.rename: dict[Value, Value] = {}  # results a formula put in place of the trace's
        self.tangents: dict[Value, Value] = {}

    def run(self, moving: Sequence[Value]) -> Trace:
        for v in moving:
            if not v.is_differentiable:
                raise RuleError(f"{v.name} is a {v.type}; only floating-point and complex tensors have tangents")
            t = v.tensor
            self.tangents[v] = self.builder.input(f"t_{v.name}", TensorType(t.dtype, t.shape, t.stride, t.device))
        for eqn in self.trace.equations:
            self.equation(eqn.substitute(self.rename) if self.rename else eqn)
        outputs = substitute(list(self.trace.outputs), self.rename)
        moved = [self.tangents.get(o) if isinstance(o, Value) else None for o in outputs]
        mutations = {target: self.rename.get(v, v) for target, v in self.trace.mutations.items()}
        return self.builder.finish([*outputs, *moved], mutations)

    def equation(self, eqn: Equation) -> None:
        moving = [v for v in dict.fromkeys(eqn.inputs()) if v in self.tangents]
        if not moving or NO_TANGENT in eqn.tags or not any(v.is_differentiable for v in eqn.results()) or stops(eqn):
            self.builder.append(eqn)
            return
        declared = rules(eqn.op)
        with self.builder.at(eqn, note=f"tangent of {name_of(eqn)}"):
            if declared is not None and declared.jvp is not None and self.holds(declared, eqn):
                self.by_rule(eqn, declared)
            else:
                self.by_formula(eqn, moving)

    def holds(self, declared: Rules, eqn: Equation) -> bool:
        """A rule hears of the tangents of positional arguments only."""
        named = values_in(tuple(eqn.bound()[1].values()))
        fits = (not declared.real or is_real(eqn)) and (declared.applies is None or declared.applies(eqn))
        return fits and not any(v in self.tangents for v in named)

    def by_rule(self, eqn: Equation, declared: Rules) -> None:
        assert declared.jvp is not None
        self.builder.append(eqn)
        positional, keyword = eqn.bound()
        ts = [self.of(a) for a in positional]
        y: object = list(eqn.outputs) if eqn.many else eqn.out
        pushed = declared.jvp(ts, y, *positional, **keyword)
        if isinstance(pushed, Pushed):
            self.rename.update(zip(eqn.results(), pushed.results, strict=True))
            listed, results = pushed.tangents, pushed.results
        else:
            given = pushed if eqn.many else [pushed]
            if not isinstance(given, (list, tuple)) or len(given) != len(eqn.outputs):
                raise RuleError(f"the jvp rule of {eqn.op} gave {pushed!r}; expected {len(eqn.outputs)} tangents")
            listed = [t for t, v in zip(given, eqn.outputs, strict=True) if v is not None]
            results = eqn.results()
        for v, t in zip(results, listed, strict=True):
            self.set(v, t)

    def of(self, a: Arg) -> object:
        """The tangent of an argument; for a list, a list, or None if none of its members moves."""
        if isinstance(a, (list, tuple)):
            ts = [self.of(item) for item in a]
            return ts if any(t is not None for t in ts) else None
        return self.tangents.get(a) if isinstance(a, Value) else None

    def set(self, v: Value, t: Any) -> None:
        """A tangent has the dtype and shape of what it is the tangent of."""
        if t is None or not v.is_differentiable:
            return
        self.tangents[v] = fit(t, v)

    def by_formula(self, eqn: Equation, moving: list[Value]) -> None:
        """PyTorch's formula computes the results again with their tangents; it stands in place of the equation."""
        formula = jvp_formula(eqn, moving, self.builder.mode)
        values = list(dict.fromkeys(eqn.inputs()))
        given = formula.trace.inputs[len(values) :]
        tangents = [conform(self.tangents[v], like.tensor) for v, like in zip(moving, given, strict=True)]
        pushed = self.builder.inline(formula.trace, [*values, *tangents], here=True)
        for old, new, t in zip(eqn.results(), pushed[: formula.results], pushed[formula.results :], strict=True):
            assert isinstance(new, Value)
            self.rename[old] = new
            self.set(new, t)
