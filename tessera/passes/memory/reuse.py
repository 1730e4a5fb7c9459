"""Writes over dead values.

In: a trace in its final order. Out: the same program, where an elementwise operator writes over its first argument, and
a region on a CPU over an argument that its kernel reads only where it writes (see `region_writes`), if
that argument is memory of the program's own which nothing reads afterwards. On a CPU fresh memory is dear: its pages
may have to be made first, and its lines are not in the caches. On a GPU it comes from a pool.
"""

from __future__ import annotations

import torch

from tessera.ir.equation import Arg, Equation, Special, Value, map_values, values_in
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, overlaps_itself
from tessera.passes.memory.alias import roots
from tessera.passes.memory.region_writes import offers_of, writing
from tessera.passes.memory.writes import aten, inplace_of

Memory = frozenset[Value]


def reuse(trace: Trace) -> Trace:
    """Operators and regions write over dead arguments."""
    return _Reuse(trace).run()


class _Reuse:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.of = trace, roots(trace)
        self.held = {root for v in trace.results() for root in self.of[v]} | {*trace.inputs, *trace.constants}
        self.last: dict[Value, int] = {}  # memory -> the last equation that touches it
        for index, eqn in enumerate(trace.equations):
            for v in eqn.inputs():
                self.last.update(dict.fromkeys(self.of[v], index))
        self.took: dict[Value, Memory] = {}  # a result written over its argument is that argument's memory
        self.names: dict[Value, Value] = {}  # what a region wrote goes by its argument's name

    def run(self) -> Trace:
        equations: list[Equation] = []
        for index, eqn in enumerate(self.trace.equations):
            eqn = eqn.substitute(self.names) if self.names else eqn
            over = self.region if isinstance(eqn.op, Special) else self.operator
            equations += over(eqn, index) or [eqn]
        if not self.took:
            return self.trace

        def look(v: Value) -> Value:
            return self.names.get(v, v)

        return self.trace.with_(
            equations=tuple(equations),
            outputs=map_values(self.trace.outputs, look),
            mutations={t: look(v) for t, v in self.trace.mutations.items()},
            symbols={s: (look(v), dim) for s, (v, dim) in self.trace.symbols.items()},
        )

    def operator(self, eqn: Equation, index: int) -> list[Equation] | None:
        """The equation as a write over a dead argument, if there is one to write over."""
        if len(eqn.outputs) != 1 or eqn.outputs[0] is None:
            return None
        op = inplace_of(eqn.op)
        if op is None or not isinstance(eqn.args[0], Value):
            return None
        by_element = torch.Tag.pointwise in eqn.op.tags  # type: ignore[union-attr]
        for args in _orders(eqn):
            target, others = args[0], values_in((args[1:], eqn.kwargs))
            if not isinstance(target, Value) or (target in others and not by_element):
                continue  # a scatter of a value into itself would read what it has written
            if self.free(target, eqn.out, index, others):
                self.take(eqn.out, target, index)
                return [eqn.with_(op=op, args=args)]
        return None

    def region(self, eqn: Equation, index: int) -> list[Equation] | None:
        """The region with results written over dead arguments; one of another shape is a view of its argument."""
        offers = offers_of(eqn)
        if not offers or None in eqn.outputs or eqn.results()[0].tensor.device.type != "cpu":
            return None
        places: dict[int, int] = {}
        views: list[Equation] = []
        for k, result in enumerate(eqn.results()):
            for j in offers.get(k, ()):
                target = eqn.args[j]
                others = values_in([a for i, a in enumerate(eqn.args) if i != j])
                if not isinstance(target, Value) or target in others:
                    continue
                if self.free(target, result, index, others, reshaped=True):
                    places[k] = j
                    self.take(result, target, index)
                    if target.type == result.type:
                        self.names[result] = target
                    else:
                        args = (target, list(result.shape))
                        views.append(Equation(aten.view.default, args, {}, (result,), False, eqn.source, eqn.tags))
                    break
        return [writing(eqn, places), *views] if places else None

    def free(self, target: Value, result: Value, index: int, others: list[Value], reshaped: bool = False) -> bool:
        """Whether a result may stand in the target's memory while the equation reads the others."""
        same = target.type == result.type or (reshaped and _same_elements(target.tensor, result.tensor))
        if not same or overlaps_itself(target.tensor.shape, target.tensor.stride):
            return False
        memory = self.memory(target)
        if not memory or any(root in self.held or self.last[root] > index for root in memory):
            return False
        return all(v is target or self.memory(v).isdisjoint(memory) for v in others)

    def take(self, result: Value, target: Value, index: int) -> None:
        """That memory lives on under the result's name."""
        memory = self.took[result] = self.memory(target)
        for root in memory:
            self.last[root] = max(self.last.get(root, index), self.last.get(result, index))
            if result in self.held:
                self.held.add(root)

    def memory(self, v: Value) -> Memory:
        """A value's memory, followed through results that were written over others."""
        found: set[Value] = set()
        for root in self.of[v]:
            found |= self.took.get(root, frozenset((root,)))
        return frozenset(found)


def _orders(eqn: Equation) -> list[tuple[Arg, ...]]:
    """The arguments as they stand, and exchanged where the operator does not care."""
    orders = [eqn.args]
    if eqn.op._opname in ("add", "mul") and len(eqn.args) == 2 and not eqn.kwargs:  # type: ignore[union-attr]
        orders.append((eqn.args[1], eqn.args[0]))
    return orders


def _same_elements(a: TensorType, b: TensorType) -> bool:
    """Both are the same elements in a row, under shapes of their own."""
    known = not a.is_symbolic and not b.is_symbolic and a.is_row_major and b.is_row_major
    return known and a.dtype == b.dtype and a.device == b.device and a.numel() == b.numel()
