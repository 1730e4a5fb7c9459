"""Gives every sum over outer dimensions its own copy of the cheap arithmetic before it, and every reader its own cast.

A cast to a wider type is never worth memory: its argument is read in fewer bytes. With a copy for every reader, each
kernel casts for itself. (`recompute` chooses what else a kernel computes again.)

The gradient of a norm's weight sums, over all rows, a product that a kernel working row by row computes too. Shared,
that product would be written by the one kernel and read by the other; computed twice, each kernel reads the inputs
only. In: a trace. Out: the same program, where such a sum has copies of the equations it reads, as far as they are
cheap and the values they start from are not larger than what would be written and read. Where one kernel computes
both and nobody else reads what is shared, there is nothing to copy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.clean.dce import dce
from tessera.passes.fuse.compiler import CONTRACT, POINTWISE, REDUCE, VIEW, Compiler, is_outer, widens
from tessera.passes.fuse.regions import fuse
from tessera.passes.memory.depend import dependencies

OUTSIDE = ("", CONTRACT)  # kinds of equations that read and write memory whatever is fused
MOST = 10  # operations on every element that are copied for one sum
SMALL = 16  # a value that is smaller by this factor is not counted


def duplicate(trace: Trace, compiler: Compiler) -> Trace:
    return _Sums(_own_casts(trace, compiler), compiler).run()


def _own_casts(trace: Trace, compiler: Compiler) -> Trace:
    """Every computing reader of a widening cast with a cast of its own."""
    users = trace.users()
    shared = {
        eqn.out: eqn
        for eqn in trace.equations
        if widens(eqn) and compiler.kind(eqn) == POINTWISE and len(users.get(eqn.out, ())) > 1
    }
    if not shared:
        return trace
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        if compiler.kind(eqn) not in (VIEW, *OUTSIDE):
            own = {v: rewrite.copy(shared[v]).out for v in dict.fromkeys(eqn.inputs()) if v in shared}
            rewrite.keep(eqn.substitute(own) if own else eqn)
    return dce(rewrite.finish())


class _Sums:
    """Sums over outer dimensions, and what leads to them."""

    def __init__(self, trace: Trace, compiler: Compiler) -> None:
        self.trace, self.compiler, self.rewrite = trace, compiler, Rewrite(trace)
        self.number = {eqn: i for i, eqn in enumerate(trace.equations)}
        self.results = set(trace.results())

    def run(self) -> Trace:
        for eqn in self.rewrite:
            if self.compiler.kind(eqn) == REDUCE and is_outer(eqn, self.compiler.reduced(eqn)):
                chain = self.chain(eqn.inputs()[0])
                if chain and self.pays(eqn, chain) and not self.one_kernel(eqn, chain):
                    own: dict[Value, Value] = {}
                    for e in chain:
                        own[e.out] = self.rewrite.copy(e, own).out
                    self.rewrite.keep(eqn.substitute(own))
        copied = self.rewrite.finish()
        return self.trace if copied is self.trace else dce(copied)

    def chain(self, v: Value) -> list[Equation]:
        """Cheap equations that lead to a value, from those whose arguments are in memory anyway."""
        visited: dict[Equation, None] = {}

        def visit(v: Value) -> None:
            eqn = self.rewrite.makers.get(v)
            if eqn is None or eqn in visited or not self.cheap(eqn) or self.kept(v):
                return
            for x in eqn.inputs():
                visit(x)
            visited[eqn] = None

        visit(v)
        chain: list[Equation] = []
        for eqn in visited:  # a view of what is in memory is in memory itself
            computed = {x for e in chain for x in e.results()}
            if self.compiler.kind(eqn) != VIEW or eqn.inputs()[0] in computed:
                chain.append(eqn)
        return chain

    def cheap(self, eqn: Equation) -> bool:
        plain = self.compiler.kind(eqn) in (POINTWISE, VIEW) and len(eqn.outputs) == 1
        return plain and not self.compiler.expensive(eqn) and not self.with_windows(eqn)

    def with_windows(self, eqn: Equation) -> bool:
        """Computed by the kernel of overlapping windows, which no sum is part of."""
        makers = (self.rewrite.makers.get(v) for v in eqn.inputs())
        return any(maker is not None and self.compiler.rereads(maker) for maker in makers)

    def kept(self, v: Value) -> bool:
        """In memory whatever is fused: a result of the program, or read by a product or by what no kernel computes, or
        by something that comes after those."""
        if v in self.results:
            return True
        number = self.number[self.rewrite.makers[v]]
        for user in self.rewrite.users.get(v, ()):
            kind = self.compiler.kind(user)
            if kind in OUTSIDE or (kind == VIEW and any(map(self.kept, user.results()))):
                return True
            if self.before_outside[self.number[user]] >> number & 1:
                return True
        return False

    @functools.cached_property
    def before_outside(self) -> list[int]:
        """For every equation, as bits: those that an equation outside of kernels needs which this one needs in turn."""
        above: list[int] = []
        behind_outside: list[int] = []
        for needs in dependencies(self.trace):
            above.append(functools.reduce(int.__or__, (above[n] | 1 << n for n in needs), 0))
            behind = (behind_outside[n] | (above[n] if self.outside[n] else 0) for n in needs)
            behind_outside.append(functools.reduce(int.__or__, behind, 0))
        return behind_outside

    @functools.cached_property
    def outside(self) -> list[bool]:
        return [self.compiler.kind(eqn) in OUTSIDE for eqn in self.trace.equations]

    def pays(self, eqn: Equation, chain: list[Equation]) -> bool:
        """Something in the chain is shared, and reading what it starts from moves no more than sharing does."""
        computed = {v for e in chain for v in e.results()}
        inside = {*chain, eqn}
        shared = any(user not in inside for v in computed for user in self.rewrite.users.get(v, ()))
        if not shared or sum(self.works(e, eqn) for e in chain) > MOST:
            return False
        leaves = {v for e in chain for v in e.inputs() if v not in computed}
        shared_bytes = 2 * eqn.inputs()[0].tensor.nbytes()
        sizes = [v.type.nbytes() for v in leaves if isinstance(v.type, TensorType)]
        return sum(n for n in sizes if n > shared_bytes / SMALL) <= shared_bytes

    def works(self, e: Equation, reduction: Equation) -> bool:
        """Takes an instruction for every element that is summed; views, widening casts and small things do not."""
        small = e.out.tensor.numel() * SMALL <= reduction.inputs()[0].tensor.numel()
        return not (small or widens(e) or self.compiler.kind(e) == VIEW)

    @functools.cached_property
    def kernels(self) -> dict[Equation, set[Equation]]:
        """What would be computed together without any copies, by each of its members."""
        regions = [{self.trace.equations[i] for i in region} for region in fuse(self.trace, self.compiler)]
        return {eqn: region for region in regions for eqn in region}

    def one_kernel(self, eqn: Equation, chain: list[Equation]) -> bool:
        """One kernel computes the sum and all that it shares with others, who are in that kernel too."""
        readers = [user for e in chain for v in e.results() for user in self.readers(v)]
        return self.kernels.get(eqn, set()).issuperset([*chain, eqn, *readers])

    def readers(self, v: Value) -> Iterator[Equation]:
        """Who computes with a value, directly or through views and casts, which go wherever their reader is."""
        for user in self.rewrite.users.get(v, ()):
            if self.compiler.kind(user) == VIEW or widens(user):
                for x in user.results():
                    yield from self.readers(x)
            else:
                yield user
