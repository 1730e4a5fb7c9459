"""A kernel recomputes what another would write for it, where it then reads fewer bytes.

A batch norm's backward takes the mean off what was normalised in two kernels, one that sums and one that is left with
the sums. What they share lies there in 32 bits, what it is made of in 16. In: a trace, and how its equations would be
fused. Out: the same program, where a kernel that reads such a value has copies of the equations that lead to it from
what is in memory anyway. What no kernel reads any more is gone; what is a result of the program, or read by others than
kernels, is written as before.
"""

from __future__ import annotations

from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.passes.clean.dce import dce
from tessera.passes.fuse.compiler import CONTRACT, POINTWISE, VIEW, Compiler, turns
from tessera.passes.fuse.regions import fuse

MOST = 4  # equations that lead to a value
SMALL = 16  # a value this many times smaller is read from memory


def recompute(trace: Trace, compiler: Compiler) -> Trace:
    return _Recompute(trace, compiler).run()


class _Recompute:
    def __init__(self, trace: Trace, compiler: Compiler) -> None:
        self.trace, self.compiler, self.rewrite = trace, compiler, Rewrite(trace)
        self.makers, self.users = self.rewrite.makers, self.rewrite.users
        self.kernel: dict[Equation, int] = {}
        for number, region in enumerate(fuse(trace, compiler)):
            inside = [trace.equations[i] for i in region]
            if not any(compiler.kind(eqn) == CONTRACT for eqn in inside):  # its tiles would compute all of it again
                self.kernel |= dict.fromkeys(inside, number)
        self.chains = {v: chain for eqn in self.kernel for v in eqn.results() if (chain := self.chain(v)) is not None}
        self.copies: dict[tuple[int, Value], Value] = {}  # by kernel

    def run(self) -> Trace:
        if not self.chains:
            return self.trace
        for eqn in self.rewrite:
            if (kernel := self.kernel.get(eqn)) is not None:
                reads = self.own_reads(eqn, kernel)
                self.rewrite.keep(eqn.substitute(reads) if reads else eqn)
        return dce(self.rewrite.finish())

    def own_reads(self, eqn: Equation, kernel: int) -> dict[Value, Value]:
        """What an equation reads -> the kernel's own copies of it."""
        return {v: own for v in dict.fromkeys(eqn.inputs()) if (own := self.own(v, kernel)) is not v}

    def own(self, v: Value, kernel: int) -> Value:
        """A kernel's copy of a value, made when first asked for; the value itself where it has none."""
        if (kernel, v) not in self.copies:
            if v not in self.chains or self.kernel[self.makers[v]] == kernel:
                return v
            for eqn in self.chains[v]:
                if (kernel, eqn.out) not in self.copies:
                    reads = self.own_reads(eqn, kernel)
                    self.copies[kernel, eqn.out] = self.rewrite.copy(eqn, reads).out
        return self.copies[kernel, v]

    def chain(self, v: Value) -> list[Equation] | None:
        """What leads to a value that other kernels read from fewer bytes than it has, all in memory; None where nothing
        does."""
        own = self.kernel[self.makers[v]]
        if all(self.kernel.get(user, own) == own for user in self.users.get(v, ())):
            return None
        chain: dict[Equation, None] = {}
        leaves: set[Value] = set()
        if not self.visit(v, v, chain, leaves):
            return None
        return list(chain) if sum(x.nbytes() for x in leaves) < v.nbytes() else None

    def visit(self, v: Value, wanted: Value, chain: dict[Equation, None], leaves: set[Value]) -> bool:
        """Collect the cheap equations of `wanted`'s kernel that lead to a value, and what they start from."""
        eqn = self.makers.get(v)
        small = v is not wanted and v.numel() * SMALL <= wanted.numel()
        if small or eqn is None or self.kernel.get(eqn) != self.kernel[self.makers[wanted]]:
            leaves.add(v)
            return True
        cheap = self.compiler.kind(eqn) in (POINTWISE, VIEW) and len(eqn.outputs) == 1 and not turns(eqn)
        if not cheap or self.compiler.expensive(eqn):
            return False
        if eqn not in chain:
            if not all(self.visit(x, wanted, chain, leaves) for x in eqn.inputs()):
                return False
            chain[eqn] = None
        return len(chain) <= MOST
