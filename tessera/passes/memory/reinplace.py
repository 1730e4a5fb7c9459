"""Writes in place where nobody can tell.

In: a functional trace, in its final order. Out: a final program, not to be transformed again, that leaves the
same values in its outputs and inputs:

  - an update of a mutated input is written into the input itself (`v = aten.slice(cache, …)`, then
    `aten.copy_(v, k)`) where its old contents are not read afterwards, and needs no copy at the end;
  - an elementwise operator, or a kernel, writes over an argument where that is a dead intermediate value;
  - what is still copied at the end is copied in an order that does not matter: sources that share memory with
    a mutated input are copied first, and so are outputs that show one.
"""

from __future__ import annotations

from tessera.ir.builder import Builder
from tessera.ir.equation import Arg, Equation, Value, map_values
from tessera.ir.mode import mode_of
from tessera.ir.trace import Trace
from tessera.ir.verify import same_type
from tessera.passes.clean.dce import dce
from tessera.passes.memory.alias import roots
from tessera.passes.memory.region_writes import write_regions
from tessera.passes.memory.reuse import reuse
from tessera.passes.memory.write_over import write_over
from tessera.passes.memory.writes import Leaf, Path, Plan, aten, plan


def reinplace(trace: Trace) -> Trace:
    """Write into mutated inputs and dead values where legal."""
    trace = write_inputs(trace)
    trace = write_regions(trace)
    trace = separate(write_over(trace))
    return reuse(trace)


# --- mutated inputs ---------------------------------------------------------------------------------


def write_inputs(trace: Trace) -> Trace:
    """Carry out every update of an input that may happen in place."""
    plans = plan(trace)
    if not plans:
        return trace
    return dce(_Writer(trace, plans).run())


class _Writer:
    def __init__(self, trace: Trace, plans: list[Plan]) -> None:
        self.trace = trace
        self.builder = Builder(trace.name, mode_of(trace))
        self.builder.reserve(list(trace.values()))
        self.leaves: dict[int, tuple[Plan, Leaf]] = {leaf.index: (p, leaf) for p in plans for leaf in p.leaves}
        self.shows: dict[Value, tuple[Plan, Path]] = {v: (p, path) for p in plans for v, (path, _) in p.shows.items()}
        self.done = {p.target for p in plans}
        self.names: dict[Value, Value] = {}

    def run(self) -> Trace:
        users = self.trace.users()
        for index, eqn in enumerate(self.trace.equations):
            eqn = eqn.with_(args=self.rename(eqn.args), kwargs=self.rename(eqn.kwargs)) if self.names else eqn
            with self.builder.at(eqn):
                if index in self.leaves:
                    self.write(*self.leaves[index])
                replaced = [v for v in eqn.results() if v in self.shows]
                if not replaced:
                    self.builder.append(eqn)
                for v in replaced:
                    owner, path = self.shows[v]
                    if path and (v in users or v in self.trace.results()):
                        self.show(owner.target, path, v)
                    elif not path:
                        self.names[v] = owner.target
        mutations = {t: self.names.get(v, v) for t, v in self.trace.mutations.items() if t not in self.done}
        return self.trace.with_(
            equations=tuple(self.builder.equations),
            outputs=self.rename(self.trace.outputs),
            mutations=mutations,
            symbols={s: (self.names.get(v, v), dim) for s, (v, dim) in self.trace.symbols.items()},
        )

    def rename(self, tree: Arg) -> Arg:
        return map_values(tree, lambda v: self.names.get(v, v))

    def write(self, owner: Plan, leaf: Leaf) -> None:
        target = self.show(owner.target, leaf.path)
        args: tuple[Arg, ...]
        args, kwargs = self.rename((leaf.args, leaf.kwargs))  # type: ignore[misc,assignment]
        if leaf.clone:
            args = map_values(args, lambda v: self.builder.emit(aten.clone.default, v))  # type: ignore[assignment]
        args = (*args[: leaf.place], target, *args[leaf.place :])
        self.builder.equations.append(
            Equation(leaf.op, args, kwargs, (), False, self.builder.source, self.builder.tags)
        )

    def show(self, v: Value, path: Path, result: Value | None = None) -> Value:
        """The part of an input that a path shows; under the name of `result` where given. One that lies otherwise than
        `result` is read by other updates only (`writes.layouts_agree`), and has a name of its own."""
        for op, args, kwargs in path:
            made = self.builder.emit(op, v, *self.rename(args), **self.rename(kwargs))  # type: ignore[misc,arg-type]
            assert isinstance(made, Value)
            v = made
        if result is None:
            return v
        if same_type(v.type, result.type):
            self.builder.equations[-1] = self.builder.equations[-1].with_(outputs=(result,))
            return result
        self.names[result] = v
        return v


# --- what is copied at the end ----------------------------------------------------------------------


def separate(trace: Trace) -> Trace:
    """Copy sources and outputs that show a mutated input, which the copies at the end would overwrite."""
    targets = {t for t, v in trace.mutations.items() if t is not v}
    if not targets:
        return trace
    of = roots(trace)
    builder = Builder(trace.name, mode_of(trace))
    builder.reserve(list(trace.values()))
    copies: dict[Value, Value] = {}

    def apart(v: Value) -> Value:
        if of[v].isdisjoint(targets):
            return v
        if v not in copies:
            made = builder.emit(aten.clone.default, v)
            assert isinstance(made, Value)
            copies[v] = made
        return copies[v]

    mutations = {t: t if t is v else apart(v) for t, v in trace.mutations.items()}
    outputs = map_values(trace.outputs, apart)
    if not copies:
        return trace
    return trace.with_(equations=(*trace.equations, *builder.equations), mutations=mutations, outputs=outputs)


__all__ = ["reinplace", "reuse", "separate", "write_inputs"]
