"""Which weights are experts' matrices, read off the program.

In: a captured program, its weights by name, an axis and its ranks. Out: for each stack of matrices that
`tessera.experts` is given the dimension that counts the experts. A stack may be a view of a weight, such as a half of
one that holds two layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tessera.distributed.tensor_parallel import Cuts
from tessera.ir.call import in_place
from tessera.ir.equation import Equation, Value
from tessera.ir.trace import Trace
from tessera.ops.factors.lookup import factors_of
from tessera.ops.factors.rule import tensors
from tessera.util.errors import OptionError

STACKS = slice(3, 6)  # up, down and gate among the operator's arguments


def expert_stacks(trace: Trace, weights: Mapping[str, Value], axis: str, ranks: int) -> Cuts:
    trace = in_place(trace)
    makers = {v: e for e in trace.equations for v in e.results()}
    names, cuts, seen = {v: name for name, v in weights.items()}, Cuts(), False
    for eqn in trace.equations:
        if str(eqn.op) != "tessera.experts.default":
            continue
        seen = True
        for stack in eqn.args[STACKS]:
            weight, dim = _origin(stack, makers) if isinstance(stack, Value) else (None, 0)
            if weight not in names:
                continue
            if weight.shape[dim] % ranks:  # type: ignore[union-attr, operator]
                raise OptionError(
                    f"{names[weight]}: expected experts that {axis}={ranks} divides, got {weight.shape[dim]}"  # type: ignore[union-attr, index]
                )
            cuts.weights[weight] = dim  # type: ignore[index]
    if not seen:
        raise OptionError(f"plan: {axis} splits experts, expected tessera.experts in the model, got none")
    return cuts


def _origin(v: Value, makers: Mapping[Value, Equation]) -> tuple[Value, int]:
    """What a stack is a view of, and where its first dimension is there."""
    dim = 0
    while v in makers:
        eqn = makers[v]
        rule, operands = factors_of(eqn), tensors(eqn)
        if rule is None or len(operands) != 1:
            break
        dims = rule.results[eqn.outputs.index(v)]
        factor = dims[dim][:1] if dims else ()
        if not factor or factor not in rule.operands[0]:
            break
        v, dim = operands[0], rule.operands[0].index(factor)
    return v, dim


def stacks(trace: Trace) -> Iterator[tuple[Value, int]]:
    """The stacks that `tessera.experts` is given, each with the dimension that stands between an expert's layers; the
    first one counts the experts."""
    for eqn in in_place(trace).equations:
        if str(eqn.op) == "tessera.experts.default":
            for stack, between in zip(eqn.args[STACKS], (1, 2, 1), strict=True):
                if isinstance(stack, Value):
                    yield stack, between
