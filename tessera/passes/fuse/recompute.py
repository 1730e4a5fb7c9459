"""Arithmetic that one kernel would write for another is computed again by the other, where that reads fewer bytes.

A batch norm's backward takes the mean off what was normalised in two kernels, one that sums and one that is left with
the sums. What they share lies there in 32 bits, what it is made of in 16. In: a trace, and how its equations would be
fused. Out: the same program, where a kernel that reads such a value has copies of the equations that lead to it from
what is in memory anyway. What no kernel reads any more is gone; what is a result of the program, or read by others than
kernels, is written as before.
"""

from __future__ import annotations

from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Value
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.clean.dce import dce
from tessera.passes.fuse.regions import CONTRACT, POINTWISE, VIEW, Compiler, fuse

MOST = 4  # equations that lead to a value
SMALL = 16  # so many times less is not worth counting

Chain = list[Equation]


def compute_again(trace: Trace, compiler: Compiler) -> Trace:
    return _Again(trace, compiler).run()


class _Again:
    def __init__(self, trace: Trace, compiler: Compiler) -> None:
        self.trace, self.compiler = trace, compiler
        self.maker = {v: eqn for eqn in trace.equations for v in eqn.results()}
        self.kernel: dict[Equation, int] = {}
        for number, region in enumerate(fuse(trace, compiler)):
            inside = [trace.equations[i] for i in region]
            if not any(compiler.kind(eqn) == CONTRACT for eqn in inside):  # its tiles would compute all of it again
                self.kernel |= dict.fromkeys(inside, number)
        self.users = trace.users()
        self.chains = {v: chain for eqn in self.kernel for v in eqn.results() if (chain := self.chain(v)) is not None}
        self.copies: dict[tuple[int, Value], Value] = {}  # by kernel
        self.equations: list[Equation] = []
        self.names = Builder(trace.name)
        self.names.reserve(list(trace.values()))

    def run(self) -> Trace:
        if not self.chains:
            return self.trace
        for eqn in self.trace.equations:
            kernel = self.kernel.get(eqn)
            self.equations.append(eqn if kernel is None else self.with_own(eqn, kernel))
        return dce(self.trace.with_(equations=tuple(self.equations)))

    def with_own(self, eqn: Equation, kernel: int) -> Equation:
        """An equation of a kernel, reading the kernel's own copies."""
        rename = {v: own for v in dict.fromkeys(eqn.inputs()) if (own := self.own(v, kernel)) is not v}
        return eqn.substitute(rename) if rename else eqn

    def own(self, v: Value, kernel: int) -> Value:
        """A kernel's copy of a value, made when first asked for; the value itself where it has none."""
        if (kernel, v) not in self.copies:
            if v not in self.chains or self.kernel[self.maker[v]] == kernel:
                return v
            for eqn in self.chains[v]:
                if (kernel, eqn.out) not in self.copies:
                    new = self.names.value(eqn.out.name, eqn.out.type)
                    self.equations.append(self.with_own(eqn, kernel).with_(outputs=(new,)))
                    self.copies[kernel, eqn.out] = new
        return self.copies[kernel, v]

    def chain(self, v: Value) -> Chain | None:
        """What leads to a value that other kernels read from fewer bytes than it has, all in memory; None where nothing
        does."""
        own = self.kernel[self.maker[v]]
        if all(self.kernel.get(user, own) == own for user in self.users.get(v, ())):
            return None
        found: dict[Equation, None] = {}
        leaves: set[Value] = set()
        if not self.visit(v, v, found, leaves):
            return None
        return list(found) if sum(_nbytes(x) for x in leaves) < _nbytes(v) else None

    def visit(self, v: Value, wanted: Value, found: dict[Equation, None], leaves: set[Value]) -> bool:
        """Collect the cheap equations of `wanted`'s kernel that lead to a value, and what they start from."""
        eqn = self.maker.get(v)
        small = v is not wanted and _numel(v) * SMALL <= _numel(wanted)
        if small or eqn is None or self.kernel.get(eqn) != self.kernel[self.maker[wanted]]:
            leaves.add(v)
            return True
        cheap = self.compiler.kind(eqn) in (POINTWISE, VIEW) and len(eqn.outputs) == 1
        if not cheap or self.compiler.expensive(eqn):
            return False
        if eqn not in found:
            if not all(self.visit(x, wanted, found, leaves) for x in eqn.inputs()):
                return False
            found[eqn] = None
        return len(found) <= MOST


def _nbytes(v: Value) -> int:
    return v.type.nbytes() if isinstance(v.type, TensorType) else 0


def _numel(v: Value) -> int:
    return v.type.numel() if isinstance(v.type, TensorType) else 1
