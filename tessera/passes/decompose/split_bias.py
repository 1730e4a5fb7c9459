"""The bias of a linear layer as a sum of its own, where a kernel after the layer adds it for nothing.

In: a trace whose operators have been taken apart, and which layers and readers are meant. Out: the same program, where
`y = linear(x, w, b)` is `y = linear(x, w) + b` if everything that reads `y`, through views or not, may be part of a
kernel. The library adds a bias by writing it into the result and adding the product to that: the result is written
twice and read once more. In a kernel that reads the result anyway the sum costs one instruction.
"""

from __future__ import annotations

from collections.abc import Callable

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import replace_each
from tessera.ir.trace import Trace

VIEW = "view"


def split_bias(trace: Trace, layer: Callable[[Equation], bool], kind: Callable[[Equation], str]) -> Trace:
    """`layer` says which linear layers; `kind` is empty for what kernels cannot hold, and `view` for views."""
    users, results = trace.users(), set(trace.results())

    def fused(v: Value) -> bool:
        readers = users.get(v, [])
        if v in results or not readers:
            return False
        return all(kind(e) and (kind(e) != VIEW or all(map(fused, e.results()))) for e in readers)

    def wanted(eqn: Equation) -> bool:
        return _has_bias(eqn) and layer(eqn) and fused(eqn.out)

    return replace_each(trace, wanted, lambda eqn: aten.add(aten.linear(*eqn.args[:2]), eqn.args[2]))


def _has_bias(eqn: Equation) -> bool:
    return eqn.opname == "linear" and len(eqn.args) == 3 and isinstance(eqn.args[2], Value)
