"""Makes a failing case small while it still fails in the same way.

Delta debugging over a trace: outputs are dropped, then equations, whose results become inputs where something still
reads them, then gradients; at last sizes shrink. Every step is kept only if `outcome` stays what it was, so the result
fails exactly as the original did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from tessera.inspection.case import Case, is_float
from tessera.ir import fake
from tessera.ir.equation import Arg, Equation, Value, map_values, symbols_in, values_in
from tessera.ir.mode import mode_of
from tessera.ir.replay import sweep
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, Type

T = TypeVar("T")
SMALLEST = (1, 2, 3, 4)  # sizes tried in place of larger ones
Told = Callable[[int], None]


def minimise(case: Case, seconds: float = 120.0, told: Told | None = None) -> Case:
    """The smallest case found in the time given that fails as this one does; `told` hears what is left."""
    return _Search(case, time.monotonic() + seconds, told or (lambda left: None)).run()


class _Search:
    def __init__(self, case: Case, deadline: float, told: Told) -> None:
        self.case, self.deadline, self.told = case, deadline, told
        self.outcome = case.outcome()

    def run(self) -> Case:
        if not self.outcome:
            return self.case
        before = None
        while before is not self.case and time.monotonic() < self.deadline:
            before = self.case
            self.fewer_outputs()
            self.fewer_equations()
        self.fewer_gradients()
        self.smaller_sizes()
        return self.case

    def holds(self, candidate: Case | None) -> bool:
        """Take a candidate that fails in the same way."""
        if candidate is None or time.monotonic() > self.deadline or candidate.outcome() != self.outcome:
            return False
        self.case = candidate
        self.told(len(candidate.trace.equations))
        return True

    def fewer_outputs(self) -> None:
        start = self.case
        results: list[tuple[str, object]] = [("output", o) for o in dict.fromkeys(start.trace.outputs)]
        results += [("write", target) for target in start.trace.mutations]
        _ddmin(results, lambda kept: self.holds(_with_results(start, kept)))

    def fewer_equations(self) -> None:
        start = self.case
        _ddmin(list(start.trace.equations), lambda kept: self.holds(_with_equations(start, kept)))

    def fewer_gradients(self) -> None:
        start = self.case
        if start.wants_grad and not self.holds(replace(start, wants_grad=frozenset())):
            _ddmin(sorted(start.wants_grad), lambda kept: self.holds(replace(start, wants_grad=frozenset(kept))))

    def smaller_sizes(self) -> None:
        if self.case.trace.symbols:
            return
        sizes = {n for v in self.case.trace.inputs if isinstance(v.type, TensorType) for n in v.type.shape}
        for size in sorted((int(n) for n in sizes), reverse=True):
            for smaller in (n for n in SMALLEST if n < size):
                if self.holds(_resized(self.case, size, smaller)):
                    break


def _ddmin(items: list[T], test: Callable[[list[T]], bool]) -> list[T]:
    """A small part of the items for which the test holds, none of whose chunks can be left out."""
    count = 2
    while len(items) >= 2:
        size = -(-len(items) // count)
        for start in range(0, len(items), size):
            rest = items[:start] + items[start + size :]
            if rest and test(rest):
                items, count = rest, max(count - 1, 2)
                break
        else:
            if size == 1:
                break
            count = min(len(items), 2 * count)
    return items


# --- smaller programs ---


def _with_results(case: Case, kept: Sequence[tuple[str, object]]) -> Case | None:
    outputs = tuple(x for kind, x in kept if kind == "output")
    writes = {x for kind, x in kept if kind == "write"}
    mutations = {t: v for t, v in case.trace.mutations.items() if t in writes}
    if not values_in(outputs) and not mutations:
        return None
    return case.with_trace(tidy(case.trace.with_(outputs=outputs, mutations=mutations)))


def _with_equations(case: Case, kept: Sequence[Equation]) -> Case | None:
    """These equations alone: what others computed for them comes in as inputs, what nothing of them reads goes out."""
    trace = case.trace
    computed = {v for eqn in kept for v in eqn.results()}
    read = {v for eqn in kept for v in eqn.inputs()}
    mutations = {t: v for t, v in trace.mutations.items() if v in computed}
    outputs = tuple(v for eqn in kept for v in eqn.results() if v not in read or v in trace.outputs)
    known = {*trace.inputs, *computed}
    needed = dict.fromkeys(v for eqn in kept for v in eqn.inputs() if v not in known)
    for symbol in symbols_in([(eqn.args, eqn.kwargs) for eqn in kept]):
        if symbol in trace.symbols and trace.symbols[symbol][0] not in known:
            needed[trace.symbols[symbol][0]] = None
    symbols = {s: place for s, place in trace.symbols.items() if place[0] in known or place[0] in needed}
    smaller = trace.with_(
        inputs=(*trace.inputs, *needed), equations=tuple(kept), outputs=outputs, mutations=mutations, symbols=symbols
    )
    grads = case.wants_grad | ({v.name for v in needed if is_float(v)} if case.wants_grad else set())
    return replace(case, wants_grad=grads).with_trace(tidy(smaller))


def tidy(trace: Trace) -> Trace:
    """Without equations nobody needs, and without inputs nobody reads."""
    trace = sweep(trace)
    read = {v for eqn in trace.equations for v in eqn.inputs()} | {*trace.results(), *trace.mutations}
    mentioned = symbols_in([(eqn.args, eqn.kwargs) for eqn in trace.equations])
    shapes = [v.type.shape for v in trace.values() if isinstance(v.type, TensorType) and v in read]
    mentioned |= symbols_in([tuple(s) for s in shapes])
    read |= {v for s, (v, _) in trace.symbols.items() if s in mentioned}
    inputs = tuple(v for v in trace.inputs if v in read)
    values = {*inputs, *(v for eqn in trace.equations for v in eqn.results())}
    symbols = {s: place for s, place in trace.symbols.items() if place[0] in values}
    return trace.with_(inputs=inputs, symbols=symbols)


# --- smaller sizes ---


def _resized(case: Case, size: int, smaller: int) -> Case | None:
    """Every `size` in shapes and arguments becomes `smaller`, and types are inferred again; None where none fit."""
    trace, mode = case.trace, mode_of(case.trace)
    if trace.inner():
        return None  # programs inside the program have types of their own
    env: dict[Value, Value] = {v: Value(v.name, _resized_type(v.type, size, smaller)) for v in trace.inputs}
    equations = []
    try:
        for eqn in trace.equations:
            args, kwargs = (
                _resized_argument(map_values(a, env.__getitem__), size, smaller) for a in (eqn.args, eqn.kwargs)
            )
            types = fake.infer(eqn.op, args, kwargs, mode)  # type: ignore[arg-type]
            listed = types if isinstance(types, list) else [types]
            outputs = tuple(None if v is None else Value(v.name, t) for v, t in zip(eqn.outputs, listed, strict=True))  # type: ignore[arg-type]
            env.update({old: new for old, new in zip(eqn.outputs, outputs, strict=True) if old is not None})  # type: ignore[misc]
            equations.append(eqn.with_(args=args, kwargs=kwargs, outputs=outputs))
    except Exception:  # sizes that no longer fit: whatever an operator's type rule raises
        return None
    resized = trace.with_(
        inputs=tuple(env[v] for v in trace.inputs),
        equations=tuple(equations),
        outputs=map_values(trace.outputs, env.__getitem__),
        mutations={env[t]: env[v] for t, v in trace.mutations.items()},
    )
    ranges = {
        name: (low, min(high, smaller - 1)) if high == size - 1 else (low, high)
        for name, (low, high) in case.ranges.items()
    }  # noqa: E501
    return replace(case, trace=resized, ranges=ranges)


def _resized_type(t: Type, size: int, smaller: int) -> Type:
    """The same dimensions in the same order in memory, one after the other."""
    if not isinstance(t, TensorType) or size not in t.shape:
        return t
    shape = tuple(smaller if n == size else n for n in t.shape)
    order = sorted(range(t.ndim), key=lambda d: (t.stride[d], -d))
    stride, step = [0] * t.ndim, 1
    for d in order:
        stride[d] = 0 if t.stride[d] == 0 and t.shape[d] != 1 else step
        step *= shape[d] if stride[d] else 1
    return TensorType(t.dtype, shape, tuple(stride), t.device, t.layout)


def _resized_argument(a: Arg, size: int, smaller: int) -> Arg:
    if isinstance(a, (list, tuple)):
        return type(a)(_resized_argument(item, size, smaller) for item in a)
    if isinstance(a, dict):
        return {key: _resized_argument(item, size, smaller) for key, item in a.items()}
    return smaller if type(a) is int and a == size else a
