"""Writes over dead values.

In: a trace in its final order. Out: the same program, where an elementwise operator writes over its first argument, and
a region over an argument that its kernel reads only where it writes (see `region_writes`), if that argument is memory
of the program's own which nothing reads afterwards. Argument and result are then never held at once, which is where
many programs need the most memory. On a CPU fresh memory is dear besides: its pages may have to be made first, and its
lines are not in the caches.
"""

from __future__ import annotations

from tessera.ir.equation import Arg, Equation, Special, Value, values_in
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import is_pointwise
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, overlaps_itself
from tessera.passes.memory.alias import last_touches, roots, shown
from tessera.passes.memory.region_writes import offers_of, writing
from tessera.passes.memory.writes import aten, inplace_of

Memory = frozenset[Value]
# A product is added to a sum without a copy of the sum where that is its `out` too.
ADDED = {aten.addmm.default: aten.addmm.out, aten.addmm.dtype: aten.addmm.dtype_out}


def reuse(trace: Trace) -> Trace:
    """Operators and regions write over dead arguments."""
    return _Reuse(trace).run()


class _Reuse:
    def __init__(self, trace: Trace) -> None:
        self.rewrite, self.of = Rewrite(trace), roots(trace)
        self.held = shown(trace.results(), self.of) | {*trace.inputs, *trace.constants}
        self.last = last_touches(trace.equations, self.of)
        self.took: dict[Value, Memory] = {}  # a result written over its argument is that argument's memory

    def run(self) -> Trace:
        for index, eqn in enumerate(self.rewrite):
            over = self.region if isinstance(eqn.op, Special) else self.operator
            self.rewrite.keep(*(over(eqn, index) or [eqn]))
        return self.rewrite.finish()

    def operator(self, eqn: Equation, index: int) -> list[Equation] | None:
        """The equation as a write over a dead argument, if there is one to write over."""
        if len(eqn.outputs) != 1 or eqn.outputs[0] is None:
            return None
        if not isinstance(eqn.args[0], Value) or (inplace_of(eqn.op) is None and eqn.op not in ADDED):
            return None
        by_element = is_pointwise(eqn.op)
        for args in _orders(eqn):
            target, others = args[0], values_in((args[1:], eqn.kwargs))
            if not isinstance(target, Value) or (target in others and not by_element):
                continue  # a scatter of a value into itself would read what it has written
            if self.free(target, eqn.out, index, others):
                self.take(eqn.out, target, index)
                return [_written(eqn, target, args)]
        return None

    def region(self, eqn: Equation, index: int) -> list[Equation] | None:
        """The region with results written over dead arguments; one of another shape is a view of its argument."""
        offers = offers_of(eqn)
        if not offers or None in eqn.outputs:
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
                        self.rewrite.rename(result, target)  # what a region wrote goes by its argument's name
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
        if not all(root is target or _as_large(root.tensor, result.tensor) for root in memory):
            return False  # whoever holds the result would hold more memory than it sees
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
        roots: set[Value] = set()
        for root in self.of[v]:
            roots |= self.took.get(root, frozenset((root,)))
        return frozenset(roots)


def _written(eqn: Equation, target: Value, args: tuple[Arg, ...]) -> Equation:
    if eqn.op in ADDED:
        return eqn.with_(op=ADDED[eqn.op], kwargs={**eqn.kwargs, "out": target})
    return eqn.with_(op=inplace_of(eqn.op), args=args)


def _orders(eqn: Equation) -> list[tuple[Arg, ...]]:
    """The arguments as they stand, and exchanged where the operator does not care."""
    orders = [eqn.args]
    if eqn.opname in ("add", "mul") and len(eqn.args) == 2 and not eqn.kwargs:
        orders.append((eqn.args[1], eqn.args[0]))
    return orders


def _as_large(a: TensorType, b: TensorType) -> bool:
    known = not a.is_symbolic and not b.is_symbolic
    return known and a.nbytes() == b.nbytes()


def _same_elements(a: TensorType, b: TensorType) -> bool:
    """Both are the same elements in a row, under shapes of their own."""
    known = not a.is_symbolic and not b.is_symbolic and a.is_row_major and b.is_row_major
    return known and a.dtype == b.dtype and a.device == b.device and a.numel() == b.numel()
