"""Which weights tensor parallelism cuts by columns and which by rows, read off the program.

In: a captured program, its weights, the ranks of an axis. Out: for each weight the dimension that is cut. A product
whose input is whole has its weight cut by columns: its result is split along the last dimension, and so is what follows
from it element by element or head by head. Where such a value meets the next weight, that one is cut by rows, and the
result is a sum over ranks. Tables of embeddings are cut by rows too.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from tessera.ir.call import in_place
from tessera.ir.equation import Equation, Value
from tessera.ir.trace import Trace
from tessera.ops.factors.lookup import factors_of
from tessera.ops.factors.rule import Factors, tensors

PRODUCTS = ("linear", "mm", "addmm", "matmul", "_scaled_mm")
TURNED = ("t", "transpose", "permute", "_to_copy")  # a weight stays one, with its dimensions in another order
Known = dict[Value, tuple[Value, tuple[int, ...]]]  # of a weight or its view, the weight and its dimensions


@dataclass
class Cuts:
    weights: dict[Value, int] = field(default_factory=dict)  # the dimension that is cut
    summed: list[Value] = field(default_factory=list)  # results that are sums over ranks
    split: dict[Value, int] = field(default_factory=dict)  # the dimension along which other values come to be split
    of: dict[Value, frozenset[Value]] = field(default_factory=dict)  # the weights by which they are
    lost: set[Value] = field(default_factory=set)  # weights whose cut some reader must undo


def columns_and_rows(trace: Trace, weights: Collection[Value], ranks: int) -> Cuts:
    cuts = Cuts()
    known: Known = {w: (w, tuple(range(w.ndim))) for w in weights}
    for eqn in in_place(trace).equations:
        operands = tensors(eqn)
        rule = factors_of(eqn)
        if rule is None:
            continue
        if eqn.opname == "embedding" and operands[0] in known:
            if _take(cuts, known, operands[0], 0, ranks):
                cuts.summed.append(eqn.out)
        elif eqn.opname in PRODUCTS and (at := _matrix(operands, rule, known)) is not None:
            _product(eqn, rule, at, known, ranks, cuts)
        elif eqn.opname in TURNED and operands[0] in known:
            weight, dims = known[operands[0]]
            (result,) = rule.results
            assert result is not None
            known[eqn.out] = weight, tuple(dims[rule.operands[0].index(d)] for d in result)
        else:
            _follow(eqn, rule, ranks, cuts)
    return cuts


def _take(cuts: Cuts, known: Known, view: Value, dim: int, ranks: int) -> bool:
    """Cut a weight, unless it is cut otherwise or cannot be."""
    weight, dims = known[view]
    dim = dims[dim]
    size = weight.shape[dim]
    if cuts.weights.get(weight, dim) != dim or not isinstance(size, int) or size % ranks:
        return False
    cuts.weights[weight] = dim
    return True


def _matrix(operands: list[Value], rule: Factors, known: Known) -> int | None:
    """Which operand of a product is a weight that is multiplied; where a weight is only added, none."""
    (inner,) = rule.reduced
    return next((i for i, v in enumerate(operands) if v in known and (inner,) in rule.operands[i]), None)


def _product(eqn: Equation, rule: Factors, at: int, known: Known, ranks: int, cuts: Cuts) -> None:
    operands = tensors(eqn)
    (inner,) = rule.reduced
    weight, dims = operands[at], rule.operands[at]
    fed = any(
        cuts.split.get(v) == d.index((inner,)) for v, d in zip(operands, rule.operands, strict=True) if (inner,) in d
    )
    if fed:
        if _take(cuts, known, weight, dims.index((inner,)), ranks):
            cuts.summed.append(eqn.out)
        return
    if weight.ndim != 2:
        return
    (outer,) = next(d for d in dims if d != (inner,))
    if not _take(cuts, known, weight, dims.index((outer,)), ranks):
        return
    (result,) = rule.results
    assert result is not None
    cuts.split[eqn.out], cuts.of[eqn.out] = result.index((outer,)), frozenset((known[weight][0],))
    for i, v in enumerate(operands):
        if i in rule.addends and v in known and (outer,) in rule.operands[i]:
            _take(cuts, known, v, rule.operands[i].index((outer,)), ranks)


def _follow(eqn: Equation, rule: Factors, ranks: int, cuts: Cuts) -> None:
    """The results of an operator that may be cut where its operands are."""
    factors, split = set(), cuts.split
    origins = frozenset(w for v in tensors(eqn) for w in cuts.of.get(v, ()))
    for v, dims in zip(tensors(eqn), rule.operands, strict=True):
        if v in split and dims[split[v]]:
            if dims[split[v]][0] in rule.whole:
                cuts.lost |= cuts.of[v]
            else:
                factors.add(dims[split[v]][0])
    if len(factors) != 1:
        return
    (factor,) = factors
    size = rule.sizes.get(factor, 0)
    if "attention" in eqn.opname:  # heads of queries that share keys are cut too: keys are repeated then
        size = math.prod(rule.sizes.values())
    if rule.shares(factor) and size % ranks:
        cuts.lost |= origins
    if not rule.splittable(factor) or factor in rule.reduced or (rule.shares(factor) and size % ranks):
        return
    for v, dims in zip(eqn.outputs, rule.results, strict=True):
        for dim, names in enumerate(dims or ()):
            if v is not None and names and names[0] == factor:
                split[v], cuts.of[v] = dim, origins
