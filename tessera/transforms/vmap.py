"""Batching, from Trace to Trace.

In: a trace of one example, and for each batched input its type with the batch and where the batch stands. Out:
a trace of the whole batch; batched values carry it at dimension 0. Equations that read nothing batched stay as
they are. Declared rules are used; other operators through PyTorch's own batching rule, or once for every example
where there is none. Where examples are the ranks along an axis of a mesh, collectives along it exchange them. Random
operators draw once ("same"), once for every example ("different"), or are refused ("error").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tessera.ir.alias import FUNCTIONAL
from tessera.ir.builder import Builder, aten
from tessera.ir.call import in_place
from tessera.ir.dist import is_collective
from tessera.ir.equation import Arg, Equation, Value, map_values, values_in
from tessera.ir.mode import mode_of
from tessera.ir.schema import is_view
from tessera.ir.trace import Trace
from tessera.ir.types import Size, TensorType
from tessera.ir.views import STRIDED
from tessera.ops.fallback import batch_formula
from tessera.ops.families import carry, pad_rank
from tessera.ops.mesh_axis import along_axis
from tessera.ops.op import rules
from tessera.torch_internals.fake import FakeTensorMode
from tessera.torch_internals.operators import OpOverload
from tessera.transforms.draws import is_draw, lender, no_common_draw, refused_draw
from tessera.util.errors import BatchError, OptionError, RuleError

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
    axis: str = "",
) -> Batched:
    """The trace over a batch of `size` examples; `batched` says which inputs carry it, and at which dimension. `axis`
    is the axis of a mesh whose ranks they are."""
    if randomness not in RANDOMNESS:
        raise OptionError(f"randomness: expected one of {', '.join(RANDOMNESS)}, got {randomness!r}")
    trace = in_place(trace)
    builder = Builder(trace.name, mode or mode_of(trace))
    builder.constants.update(trace.constants)
    builder.reserve(list(trace.constants))
    builder.randomness = randomness
    with builder:
        return _Batch(builder, trace, size, randomness, axis).run(batched)


class _Batch:
    def __init__(self, builder: Builder, trace: Trace, size: Size, randomness: str, axis: str) -> None:
        self.builder, self.trace, self.size, self.randomness, self.axis = builder, trace, size, randomness, axis
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
                raise BatchError(
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
        return self.rows[v] if v in self.rows else carry(self.plain.get(v, v), False, self.size)

    # --- equations ---

    def equation(self, eqn: Equation) -> None:
        values = list(dict.fromkeys(eqn.inputs()))
        drawn = is_draw(eqn)
        if drawn and self.randomness == "error":
            raise refused_draw("vmap", eqn)
        with self.builder.at(eqn):
            if is_collective(eqn):
                self.collective(eqn)
            elif not any(v in self.rows for v in values) and not (drawn and self.randomness == "different"):
                self.unbatched(eqn)
            elif drawn:
                self.draw(eqn, values)
            elif not self.by_rule(eqn):
                self.by_formula(eqn, values)

    def unbatched(self, eqn: Equation) -> None:
        eqn = eqn.substitute(self.plain) if self.plain else eqn
        if any(v.name in self.builder._names for v in eqn.results()):
            outputs = tuple(None if v is None else self.builder.value(v.name, v.type) for v in eqn.outputs)
            self.plain.update({v: n for v, n in zip(eqn.outputs, outputs, strict=True) if v is not None})  # type: ignore[misc]
            eqn = eqn.with_(outputs=outputs)
        self.builder.append(eqn)

    def collective(self, eqn: Equation) -> None:
        (x,) = eqn.inputs()
        assert isinstance(self.size, int)
        out, varies = along_axis(eqn, self.axis, self.size, self.now(x), x in self.rows)
        (self.rows if varies else self.plain)[eqn.out] = out

    def by_rule(self, eqn: Equation) -> bool:
        """Whether a declared rule batched the equation."""
        declared = rules(eqn.op)
        if declared is None or declared.batch is None:
            if eqn.opname in STRIDED:
                self.strided(eqn)
                return True
            return False
        positional, keyword = eqn.bound()
        if any(v in self.rows for v in values_in(tuple(keyword.values()))):
            return False  # a rule hears of the batches of positional arguments only
        on = [self.on(a) for a in positional]
        args = [self.lookup(a) for a in positional]
        batched = declared.batch(self.size, on, *args, **{k: self.lookup(a) for k, a in keyword.items()})
        if batched is NotImplemented:
            return False
        listed = list(batched) if eqn.many else [batched]
        if len(listed) != len(eqn.outputs):
            raise RuleError(f"the batch rule of {eqn.op} gave {len(listed)} results, expected {len(eqn.outputs)}")
        self.rows.update({v: r for v, r in zip(eqn.outputs, listed, strict=True) if v is not None})
        return True

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
        x, *rest = eqn.bound()[0]
        size, stride, offset = rest[-3:]
        assert isinstance(x, Value)
        count, reach = 1, offset or 0
        for n in x.shape:
            count = count * n  # type: ignore[assignment]
        for n, s in zip(size, stride, strict=True):  # type: ignore[call-overload]
            reach = reach + max(n - 1, 0) * s  # type: ignore[operator]
        if not self.in_rows(x) or not x.tensor.is_row_major or (count and reach >= count):  # type: ignore[operator]
            raise BatchError(
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
        maker = next((e for e in self.trace.equations if v in e.results()), None)
        if maker is not None and is_view(maker.op):
            return all(map(self.in_rows, maker.inputs()))
        return True

    def by_formula(self, eqn: Equation, values: list[Value]) -> None:
        """By PyTorch's batching rule; example by example where it has none that can be traced."""
        if eqn.op is FUNCTIONAL:  # it writes copies of its arguments: they must have room for the batch
            for v in values:
                self.rows[v] = self.row(v)
        try:
            results = self.formula(eqn, values)
        except RuleError:
            if not isinstance(self.size, int):
                raise
            results = self.examples(eqn, values, self.size)
        self.rows.update(dict(zip(eqn.results(), results, strict=True)))

    def formula(self, eqn: Equation, values: list[Value]) -> list[Value]:
        batched = {v: self.rows[v].tensor for v in values if v in self.rows}
        formula = batch_formula(eqn, batched, self.builder.mode, self.size, self.randomness)
        return self.builder.inline(formula.trace, [self.now(v) for v in values], here=True)  # type: ignore[return-value]

    def examples(self, eqn: Equation, values: list[Value], size: int) -> list[Value]:
        """The results of the equation for one example after the other, stacked."""
        if size == 0:
            return [aten.empty([0, *v.shape], dtype=v.dtype, device=v.tensor.device) for v in eqn.results()]
        columns: list[list[Value]] = [[] for _ in eqn.results()]
        for i in range(size):
            env = {v: aten.select(self.rows[v], 0, i) if v in self.rows else self.now(v) for v in values}
            args, kwargs = (map_values(a, env.__getitem__) for a in (eqn.args, eqn.kwargs))
            result = self.builder.emit(eqn.op, *args, **kwargs)  # type: ignore[misc]
            listed = [v for v in (result if eqn.many else [result]) if v is not None]  # type: ignore[union-attr]
            for column, v in zip(columns, listed, strict=True):
                column.append(v)  # type: ignore[arg-type]
        return [aten.stack(column) for column in columns]

    def draw(self, eqn: Equation, values: list[Value]) -> None:
        shape = lender(eqn)
        if shape is None:
            self.draw_by_formula(eqn, values)
            return
        parameters = [v for v in values if v is not shape and v in self.rows]
        if self.randomness == "different":
            env = {shape: self.row(shape)} | {v: pad_rank(self.rows[v], shape.ndim + 1) for v in parameters}
            drawn = self.rows
        elif parameters:
            raise no_common_draw(eqn)
        else:
            env = {shape: aten.new_empty(self.now(shape), list(shape.shape))}
            drawn = self.plain
        args, kwargs = (map_values(a, lambda v: env.get(v) or self.now(v)) for a in (eqn.args, eqn.kwargs))
        result = self.builder.emit(eqn.op, *args, **kwargs)  # type: ignore[misc]
        drawn.update(dict(zip(eqn.results(), result if eqn.many else [result], strict=True)))  # type: ignore[arg-type]

    def draw_by_formula(self, eqn: Equation, values: list[Value]) -> None:
        if self.randomness == "different":
            self.by_formula(eqn, values)
            return
        try:
            results = self.formula(eqn, values)
        except RuleError as error:
            raise no_common_draw(eqn) from error
        self.rows.update(dict(zip(eqn.results(), results, strict=True)))


def _bound(eqn: Equation) -> tuple[list[Arg], dict[str, Arg]]:
    if isinstance(eqn.op, OpOverload):
        return eqn.bound()
    return list(eqn.args), eqn.kwargs
