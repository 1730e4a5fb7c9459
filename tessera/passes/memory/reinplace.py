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

from tessera.ir.equation import Arg, Equation, Value, map_values, substitute
from tessera.ir.rewrite import Rewrite
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
        self.trace, self.rewrite = trace, Rewrite(trace)
        self.leaves: dict[int, tuple[Plan, Leaf]] = {leaf.index: (p, leaf) for p in plans for leaf in p.leaves}
        self.shows: dict[Value, tuple[Plan, Path]] = {v: (p, path) for p in plans for v, (path, _) in p.shows.items()}
        self.done = {p.target for p in plans}

    def run(self) -> Trace:
        needed = {*self.rewrite.results, *self.rewrite.users}
        for index, eqn in enumerate(self.rewrite):
            with self.rewrite.builder.at(eqn):
                if index in self.leaves:
                    self.write(*self.leaves[index])
                for v in eqn.results():
                    if v in self.shows:
                        self.rewrite.erase()
                        owner, path = self.shows[v]
                        if path and v in needed:
                            self.show(owner.target, path, v)
                        elif not path:
                            self.rewrite.rename(v, owner.target)
        rewritten = self.rewrite.finish()
        return rewritten.with_(mutations={t: v for t, v in rewritten.mutations.items() if t not in self.done})

    def write(self, owner: Plan, leaf: Leaf) -> None:
        builder = self.rewrite.builder
        target = self.show(owner.target, leaf.path)
        args: tuple[Arg, ...]
        args, kwargs = substitute((leaf.args, leaf.kwargs), self.rewrite.renamed)
        if leaf.clone:
            args = map_values(args, lambda v: builder.emit(aten.clone.default, v))  # type: ignore[assignment]
        args = (*args[: leaf.place], target, *args[leaf.place :])
        builder.equations.append(Equation(leaf.op, args, kwargs, (), False, builder.source, builder.tags))

    def show(self, v: Value, path: Path, result: Value | None = None) -> Value:
        """The part of an input that a path shows; under the name of `result` where given. One that lies otherwise than
        `result` is read by other updates only (`writes.layouts_agree`), and has a name of its own."""
        for op, args, kwargs in path:
            args, kwargs = substitute((args, kwargs), self.rewrite.renamed)
            v = self.rewrite.builder.emit(op, v, *args, **kwargs)  # type: ignore[assignment]
        if result is None:
            return v
        if same_type(v.type, result.type):
            last = self.rewrite.equations[-1]
            self.rewrite.equations[-1] = last.with_(outputs=(result,))
            return result
        self.rewrite.rename(result, v)
        return v


# --- what is copied at the end ----------------------------------------------------------------------


def separate(trace: Trace) -> Trace:
    """Copy sources and outputs that show a mutated input, which the copies at the end would overwrite."""
    targets = {t for t, v in trace.mutations.items() if t is not v}
    if not targets:
        return trace
    of = roots(trace)
    rewrite = Rewrite(trace)
    rewrite.keep(*trace.equations)
    copies: dict[Value, Value] = {}

    def separated(v: Value) -> Value:
        if of[v].isdisjoint(targets):
            return v
        if v not in copies:
            copies[v] = rewrite.builder.emit(aten.clone.default, v)  # type: ignore[assignment]
        return copies[v]

    mutations = {t: t if t is v else separated(v) for t, v in trace.mutations.items()}
    outputs = map_values(trace.outputs, separated)
    return rewrite.finish(mutations=mutations, outputs=outputs) if copies else trace


__all__ = ["reinplace", "reuse", "separate", "write_inputs"]
