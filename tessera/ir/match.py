"""Patterns over equations and the driver that rewrites a trace with tables of them.

    x = Var("x")
    TABLE = Table([
        (P("aten.neg", P("aten.neg", x)), lambda x: x),                       # -(-x) -> x
        (P("aten.mul", x, one), lambda x: x, is_real),                        # x * 1 -> x
        (P("aten.reshape", P("aten.reshape", x, ...), shape), lambda x, shape: aten.reshape(x, shape)),
    ])

A pattern names an operator (any overload of it, or one: "aten.sum.dim_IntList") and its arguments: a `Var`
captures anything, a nested pattern matches the equation that made the argument, `...` whatever follows,
a function of one argument tests it, everything else must be equal. The replacement is called with the
captures by name and gives a captured value, or emits equations through the active builder and gives their
result; None leaves things as they are. A third entry is a named side condition over `Match`.

The driver walks the trace once, in order, so that a pattern sees rewritten producers; it repeats while a walk
changed something. Results keep their names, and an emitted replacement of another type is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tessera.ir.equation import Arg, Equation, Operator, Special, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC
from tessera.torch_internals.operators import OpOverload, op_name, overload_name

REST = ...
WALKS = 4  # tables reach their fixed point in one or two walks; more would mean two rules undo each other


@dataclass(frozen=True)
class Var:
    """Captures an argument; the same name twice must be the same argument."""

    name: str
    test: Callable[[Arg], bool] | None = None


class P:
    """`P("aten.add", x, 0)`: an equation with this operator and these arguments."""

    def __init__(self, name: str, *args: object, **kwargs: object) -> None:
        self.name = name
        self.open = bool(args) and args[-1] is REST  # more arguments, positional or named, may follow
        self.args = args[:-1] if self.open else args
        self.kwargs = kwargs


@dataclass
class Match:
    """What a pattern found: the equation at its root, its captures, the other equations it covers."""

    root: Equation
    captures: dict[str, Arg] = field(default_factory=dict)
    inner: list[Equation] = field(default_factory=list)


Replacement = Callable[..., object]
Condition = Callable[[Match], bool]
Rule = tuple[P, Replacement] | tuple[P, Replacement, Condition]
Allow = Callable[[Equation, Value], bool]


def operator_names(op: Operator) -> tuple[str, ...]:
    if isinstance(op, Special):
        return (f"{op.namespace}.{op.name}",)
    packet = f"{op.namespace}.{op_name(op)}"
    return packet, f"{packet}.{overload_name(op)}"


class Table:
    """Rules, found by the operator at their root."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.by_name: dict[str, list[Rule]] = {}
        for rule in rules:
            self.by_name.setdefault(rule[0].name, []).append(rule)
        self._found: dict[Operator, list[Rule]] = {}

    def __add__(self, other: Table) -> Table:
        return Table([rule for table in (self, other) for rules in table.by_name.values() for rule in rules])

    def rules_for(self, op: Operator) -> list[Rule]:
        if op not in self._found:
            self._found[op] = [r for name in operator_names(op) for r in self.by_name.get(name, ())]
        return self._found[op]


def match(pattern: P, eqn: Equation, made_by: dict[Value, Equation]) -> Match | None:
    """The captures of a pattern at an equation, or None."""
    captured = Match(eqn)
    return captured if _match(pattern, eqn, made_by, captured) else None


def _takes(pattern: P, eqn: Equation) -> bool:
    """As many arguments as the pattern has, of the same names."""
    if pattern.open:
        return len(eqn.args) >= len(pattern.args)
    return len(eqn.args) == len(pattern.args) and eqn.kwargs.keys() == pattern.kwargs.keys()


def _match(pattern: P, eqn: Equation, made_by: dict[Value, Equation], into: Match) -> bool:
    if not _takes(pattern, eqn):
        return False
    for wanted, given in zip(pattern.args, eqn.args, strict=False):
        if not _match_arg(wanted, given, made_by, into):
            return False
    return all(k in eqn.kwargs and _match_arg(w, eqn.kwargs[k], made_by, into) for k, w in pattern.kwargs.items())


def _match_arg(wanted: object, given: Arg, made_by: dict[Value, Equation], into: Match) -> bool:
    if isinstance(wanted, Var):
        if wanted.name in into.captures:
            return _equal(into.captures[wanted.name], given)
        into.captures[wanted.name] = given
        return wanted.test is None or wanted.test(given)
    if isinstance(wanted, P):
        maker = made_by.get(given) if isinstance(given, Value) else None
        if maker is None or len(maker.outputs) != 1 or wanted.name not in operator_names(maker.op):
            return False
        if maker.tags != into.root.tags:  # what was written under no_grad stays there
            return False
        into.inner.append(maker)
        return _match(wanted, maker, made_by, into)
    if callable(wanted) and not isinstance(wanted, (type, OpOverload)):
        return bool(wanted(given))
    return _equal(wanted, given)


def _equal(a: Arg, b: Arg) -> bool:
    if isinstance(a, Value) or isinstance(b, Value):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, SYMBOLIC) or isinstance(b, SYMBOLIC):
        return type(a) is type(b) and str(a) == str(b)
    return type(a) is type(b) and a == b


def rewrite(trace: Trace, table: Table, allow: Allow | None = None) -> Trace:
    """Apply a table until nothing changes.

    `allow(eqn, value)` says whether a value that is there already may stand in for the equation's result;
    without it, equal types decide.
    """
    only: set[Equation] | None = None
    for _ in range(WALKS):
        if not any(table.rules_for(eqn.op) for eqn in trace.equations):
            return trace
        refused: set[Equation] = set()
        after = _walk(trace, table, allow, only, refused)
        if after is trace:
            return trace
        trace, only = after, _to_look_at(trace, after, refused)
    return trace


def _to_look_at(before: Trace, after: Trace, refused: set[Equation]) -> set[Equation]:
    """What a further walk may rewrite: equations that a walk changed, those that read from them, and those whose
    replacement was refused, since that depends on what else stands where."""
    there = set(before.equations)
    changed = {eqn for eqn in after.equations if eqn not in there}
    values = {v for eqn in changed for v in eqn.outputs}
    return refused | changed | {eqn for eqn in after.equations if not values.isdisjoint(eqn.inputs())}


def _walk(trace: Trace, table: Table, allow: Allow | None, only: set[Equation] | None, refused: set[Equation]) -> Trace:
    """One walk, over all equations or `only` some. Adds to `refused` those that `allow` refused to replace."""
    rewrite = Rewrite(trace)

    def ask(eqn: Equation, new: Value) -> bool:
        if allow(eqn, new) if allow else new.type == eqn.out.type:
            return True
        refused.add(eqn)
        return False

    makers: dict[Value, Equation] = {}  # of what is written by now
    there, changed = set(trace.equations), set[Value]()
    done = 0
    equations = rewrite.equations
    for eqn in rewrite:
        for written in equations[done:]:
            makers.update((v, written) for v in written.outputs if v is not None)
            if written not in there:
                changed.update(written.results())
        done = len(equations)
        if only is not None and eqn in there and eqn not in only and changed.isdisjoint(eqn.inputs()):
            continue
        rules = table.rules_for(eqn.op)
        if rules and len(eqn.outputs) == 1 and eqn.outputs[0] is not None:
            for rule in rules:
                if _takes(rule[0], eqn) and _apply(rewrite, rule, eqn, makers, ask):
                    break
    return rewrite.finish()


def _apply(rewrite: Rewrite, rule: Rule, eqn: Equation, makers: dict[Value, Equation], allow: Allow) -> bool:
    matched = match(rule[0], eqn, makers)
    if matched is None or (len(rule) == 3 and not rule[2](matched)):
        return False
    start = len(rewrite.equations)

    def make(_: Equation) -> Value | None:
        new = rule[1](**matched.captures)
        if not isinstance(new, Value) or new is eqn.out:
            return None
        if len(rewrite.equations) == start:
            if allow(eqn, new):
                rewrite.rename(eqn.out, new)
            return None
        return new if new.type == eqn.out.type else None

    try:
        return rewrite.replace(eqn, make) or eqn.out in rewrite.renamed
    except RuntimeError:  # PyTorch refuses it for these strides: the equation stays as it is
        return False
