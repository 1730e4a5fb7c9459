"""Which weights tensor parallelism cuts by columns and which by rows, read off the program.

In: a captured program, its weights, the ranks of an axis. Out: for each weight the dimension that is cut. A product
whose input is whole has its weight cut by columns: its result is split along the last dimension, and so is what follows
from it element by element or head by head. Where such a value meets the next weight, that one is cut by rows, and the
result is a sum over ranks. Tables of embeddings are cut by rows too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tessera.ir.call import in_place
from tessera.ir.equation import Equation, Value
from tessera.ir.trace import Trace
from tessera.ops.factors.lookup import factors_of
from tessera.ops.factors.rule import Factors, tensors

PRODUCTS = ("linear", "mm", "addmm", "matmul")


@dataclass
class Cuts:
    weights: dict[Value, int] = field(default_factory=dict)  # the dimension that is cut
    summed: list[Value] = field(default_factory=list)  # results that are sums over ranks


def columns_and_rows(trace: Trace, weights: Collection[Value], ranks: int) -> Cuts:
    cuts, split = Cuts(), dict[Value, str | int]()
    for eqn in in_place(trace).equations:
        operands = tensors(eqn)
        rule = factors_of(eqn)
        if rule is None:
            continue
        if eqn.opname == "embedding" and operands[0] in weights:
            if _take(cuts, operands[0], 0, ranks):
                cuts.summed.append(eqn.out)
        elif eqn.opname in PRODUCTS and any(v in weights for v in operands):
            _product(eqn, rule, weights, ranks, cuts, split)
        else:
            _follow(eqn, rule, ranks, split)
    return cuts


def _take(cuts: Cuts, weight: Value, dim: int, ranks: int) -> bool:
    """Cut a weight, unless it is cut otherwise or cannot be."""
    size = weight.shape[dim]
    if cuts.weights.get(weight, dim) != dim or not isinstance(size, int) or size % ranks:
        return False
    cuts.weights[weight] = dim
    return True


def _product(
    eqn: Equation, rule: Factors, weights: Collection[Value], ranks: int, cuts: Cuts, split: dict[Value, str | int]
) -> None:
    operands = tensors(eqn)
    (inner,) = rule.reduced
    at = next(i for i, v in enumerate(operands) if v in weights and (inner,) in rule.operands[i])
    weight, dims = operands[at], rule.operands[at]
    fed = any(split.get(v) == d.index((inner,)) for v, d in zip(operands, rule.operands, strict=True) if (inner,) in d)
    if fed:
        if _take(cuts, weight, dims.index((inner,)), ranks):
            cuts.summed.append(eqn.out)
        return
    (outer,) = next(d for d in dims if d != (inner,))
    if weight.ndim != 2 or not _take(cuts, weight, dims.index((outer,)), ranks):
        return
    (result,) = rule.results
    assert result is not None
    split[eqn.out] = result.index((outer,))
    for i, v in enumerate(operands):
        if i in rule.addends and v in weights and (outer,) in rule.operands[i]:
            _take(cuts, v, rule.operands[i].index((outer,)), ranks)


def _follow(eqn: Equation, rule: Factors, ranks: int, split: dict[Value, str | int]) -> None:
    """The results of an operator that may be cut where its operands are."""
    factors = set()
    for v, dims in zip(tensors(eqn), rule.operands, strict=True):
        if v in split and dims[split[v]]:  # type: ignore[index]
            factors.add(dims[split[v]][0])  # type: ignore[index]
    if len(factors) != 1:
        return
    (factor,) = factors
    size = rule.sizes.get(factor, 0)
    if not rule.splittable(factor) or factor in rule.reduced or (rule.shares(factor) and size % ranks):
        return
    for v, dims in zip(eqn.outputs, rule.results, strict=True):
        for dim, names in enumerate(dims or ()):
            if v is not None and names and names[0] == factor:
                split[v] = dim
