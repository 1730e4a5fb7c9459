"""Batching, from Trace to Trace.

In: a trace of one example, and for each batched input its type with the batch and where the batch stands. Out:
a trace of the whole batch; batched values carry it at dimension 0. Equations that read nothing batched stay as
they are. Declared rules are used; other operators through PyTorch's own batching rule. Random operators draw
once ("same"), once for every example ("different"), or are refused ("error").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from tessera.ir.alias import FUNCTIONAL
from tessera.ir.builder import Builder, aten
from tessera.ir.call import in_place
from tessera.ir.equation import Arg, Equation, Value, values_in
from tessera.ir.mode import mode_of
from tessera.ir.schema import bind, draws, is_random, schema_of
from tessera.ir.trace import Trace
from tessera.ir.types import Size, TensorType
from tessera.ops.fallback import batch_formula
from tessera.ops.op import Rules, rules
from tessera.transforms.jvp import inline
from tessera.util.errors import InputError, OptionError, RuleError

_STRIDED = frozenset(("as_strided", "as_strided_copy", "as_strided_scatter"))
RANDOMNESS = ("error", "different", "same")


@dataclass(frozen=True)
class Batched:
    """`on[i]` tells whether output i carries the batch, at dimension 0."""

    trace: Trace
    on: tuple[bool, ...]


def vmap(
    trace: Trace,
    batched: Mapping[Value, tuple[TensorType, int]],
    size: Size,
    mode: FakeTensorMode | None = None,
    randomness: str = "error",
) -> Batched:
    """The trace over a batch of `size` examples; `batched` says which inputs carry it, and at which dimension."""
    if randomness not in RANDOMNESS:
        raise OptionError(f"randomness: expected one of {', '.join(RANDOMNESS)}, got {randomness!r}")
    trace = in_place(trace)
    builder = Builder(trace.name, mode or mode_of(trace))
    builder.constants.update(trace.constants)
    builder.reserve(list(trace.constants))
    with builder:
        return _Batch(builder, trace, size, randomness).run(batched)


class _Batch:
    def __init__(self, builder: Builder, trace: Trace, size: Size, randomness: str) -> None:
        self.builder, self.trace, self.size, self.randomness = builder, trace, size, randomness
        self.rows: dict[Value, Value] = {}  # value of the trace -> the same with the batch at dimension 0
        self.plain: dict[Value, Value] = {}  # value of the trace -> the same, not batched, where it is renamed

    def run(self, batched: Mapping[Value, tuple[TensorType, int]]) -> Batched:
        inputs: dict[Value, Value] = {}
        for v in self.trace.inputs:
            if v in batched:
                inputs[v] = self.builder.input(v.name, batched[v][0])
            else:
                inputs[v] = self.builder.adopt(v)
        self.symbols(inputs, batched)
        for v, (_, dim) in batched.items():
            self.rows[v] = inputs[v] if dim == 0 else aten.movedim(inputs[v], dim, 0)
        for eqn in self.trace.equations:
            self.equation(eqn)
        mutations = {}
        for target, new in self.trace.mutations.items():
            if target in batched:
                row = self.row(new)
                dim = batched[target][1]
                mutations[inputs[target]] = row if dim == 0 else aten.movedim(row, 0, dim)
            elif new in self.rows:
                raise InputError(
                    f"vmap: the function writes batched data into {target.name}, which is not batched; there is one "
                    "tensor and a different result for every example. Batch that argument too, or write a copy of it."
                )
            else:
                mutations[target] = self.plain.get(new, new)
        on = tuple(isinstance(o, Value) and o in self.rows for o in self.trace.outputs)
        outputs = [self.now(o) if isinstance(o, Value) else o for o in self.trace.outputs]
        return Batched(self.builder.finish(outputs, mutations), on)

    def symbols(self, inputs: dict[Value, Value], batched: Mapping[Value, tuple[TensorType, int]]) -> None:
        """Sizes are read off the inputs that bring them, past the batch."""
        for symbol, (v, dim) in self.trace.symbols.items():
            if v in batched and dim is not None:
                dim = dim + 1 if dim >= batched[v][1] else dim
            self.builder.symbols[symbol] = (inputs.get(v, v), dim)
        for v, (type_, dim) in batched.items():
            size = type_.shape[dim]
            if not isinstance(size, int) and size.node.expr.is_symbol:
                self.builder.symbols.setdefault(str(size.node.expr), (inputs[v], dim))

    # --- values ---

    def now(self, v: Value) -> Value:
        return self.rows.get(v) or self.plain.get(v, v)

    def row(self, v: Value) -> Value:
        """The value with the batch at dimension 0, repeated where it has none."""
        if v in self.rows:
            return self.rows[v]
        one = self.plain.get(v, v)
        return aten.expand(aten.unsqueeze(one, 0), [self.size, *one.shape])

    # --- equations ---

    def equation(self, eqn: Equation) -> None:
        values = list(dict.fromkeys(eqn.inputs()))
        drawn = draws(eqn.op, eqn.args, eqn.kwargs) or (eqn.op is FUNCTIONAL and is_random(eqn.args[0]))
        if drawn and self.randomness == "error":
            raise InputError(
                f"vmap: {eqn.op} draws random numbers ({eqn.source or 'unknown line'}); say whether every example "
                'gets its own (randomness="different") or all share one draw (randomness="same")'
            )
        with self.builder.at(eqn):
            if not any(v in self.rows for v in values) and not (drawn and self.randomness == "different"):
                self.unbatched(eqn)
                return
            found = rules(eqn.op)
            if getattr(eqn.op, "_opname", "") in _STRIDED and (found is None or found.batch is None):
                self.strided(eqn)
            elif not drawn and found is not None and found.batch is not None and self.holds(eqn):
                self.by_rule(eqn, found)
            else:
                self.by_formula(eqn, values)

    def unbatched(self, eqn: Equation) -> None:
        eqn = eqn.substitute(self.plain) if self.plain else eqn
        if any(v.name in self.builder._names for v in eqn.results()):
            outputs = tuple(None if v is None else self.builder.value(v.name, v.type) for v in eqn.outputs)
            self.plain.update({v: n for v, n in zip(eqn.outputs, outputs, strict=True) if v is not None})  # type: ignore[misc]
            eqn = eqn.with_(outputs=outputs)
        self.builder.append(eqn)

    def holds(self, eqn: Equation) -> bool:
        """A rule hears of the batches of positional arguments only."""
        return not any(v in self.rows for v in values_in(tuple(_bound(eqn)[1].values())))

    def by_rule(self, eqn: Equation, found: Rules) -> None:
        assert found.batch is not None
        positional, keyword = _bound(eqn)
        on = [self.on(a) for a in positional]
        args = [self.lookup(a) for a in positional]
        made = found.batch(self.size, on, *args, **{k: self.lookup(a) for k, a in keyword.items()})
        listed = list(made) if eqn.many else [made]  # type: ignore[call-overload]
        if len(listed) != len(eqn.outputs):
            raise RuleError(f"the batch rule of {eqn.op} gave {len(listed)} results, expected {len(eqn.outputs)}")
        self.rows.update({v: r for v, r in zip(eqn.outputs, listed, strict=True) if v is not None})

    def on(self, a: Arg) -> object:
        if isinstance(a, (list, tuple)) and values_in(a):
            return [self.on(item) for item in a]
        return isinstance(a, Value) and a in self.rows

    def lookup(self, a: Arg) -> Arg:
        if isinstance(a, Value):
            return self.now(a)
        if isinstance(a, (list, tuple)):
            return type(a)(self.lookup(item) for item in a)
        return a

    def strided(self, eqn: Equation) -> None:
        """as_strided of a vector and its kin: those of the rows, in one memory. That of an argument is the whole
        batch's: an example's addresses count from where it begins if examples lie there one after another."""
        x, *rest = _bound(eqn)[0]
        size, stride, offset = rest[-3:]
        assert isinstance(x, Value)
        count, reach = 1, offset or 0
        for n in x.shape:
            count = count * n  # type: ignore[assignment]
        for n, s in zip(size, stride, strict=True):  # type: ignore[call-overload]
            reach = reach + max(n - 1, 0) * s  # type: ignore[operator]
        if not self.in_rows(x) or not _contiguous(x.tensor) or (count and reach >= count):  # type: ignore[operator]
            raise InputError(
                f"vmap: {eqn.op} addresses the memory behind {x.name}: {x.type} ({eqn.source}), which is not one "
                "example's own; use indexing or unfold, or clone it first"
            )
        memory = aten.clone(self.row(x), memory_format=torch.contiguous_format)
        part = [] if len(rest) == 3 else [self.row(rest[0])]  # type: ignore[arg-type]
        where = [[self.size, *size], [count, *stride], offset or 0]  # type: ignore[misc]
        self.rows[eqn.out] = self.builder.emit(eqn.op, memory, *part, *where)  # type: ignore[assignment]

    def in_rows(self, v: Value) -> bool:
        """Its memory is laid out for one example as the trace saw it."""
        if v in self.trace.inputs:
            return v not in self.rows or (self.rows[v] in self.builder.inputs and self.rows[v].tensor.is_row_major)
        made = next((e for e in self.trace.equations if v in e.results()), None)
        if made is not None and isinstance(made.op, OpOverload) and schema_of(made.op).is_view:
            return all(map(self.in_rows, made.inputs()))
        return True

    def by_formula(self, eqn: Equation, values: list[Value]) -> None:
        if eqn.op is FUNCTIONAL:  # it writes copies of its arguments: they must have room for the batch
            for v in values:
                self.rows[v] = self.row(v)
        batched = {v: self.rows[v].tensor for v in values if v in self.rows}
        formula = batch_formula(eqn, batched, self.builder.mode, self.size, self.randomness)
        made = inline(self.builder, formula.trace, [self.now(v) for v in values])
        self.rows.update(dict(zip(eqn.results(), made, strict=True)))  # type: ignore[arg-type]


def _bound(eqn: Equation) -> tuple[list[Arg], dict[str, Arg]]:
    if hasattr(eqn.op, "_schema"):
        return bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
    return list(eqn.args), eqn.kwargs


def _contiguous(t: TensorType) -> bool:
    step: Size = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride), strict=True):
        if str(size) != "1" and str(stride) != str(step):
            return False
        step = step * size
    return True
