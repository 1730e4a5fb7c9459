"""Which weights tensor parallelism cuts by columns and which by rows, read off the program.

In: a captured program, its weights, the ranks of an axis. Out: for each weight the dimension that is cut. A product
whose input is whole has its weight cut by columns: its result is split along the last dimension, and so is what follows
from it element by element or head by head. Where such a value meets the next weight, that one is cut by rows, and the
result is a sum over ranks. Tables of embeddings are cut by rows too.

A weight whose columns are several blocks (`q, k, v = qkv(x).chunk(3, -1)`, or a view as `[b, s, 3, heads, head]`) is
packed. Cut plainly, ranks would have other blocks, and what follows must be gathered; where each block is cut, a rank
has its heads of all of them. `packed` says of how many blocks such weights are.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from tessera.ir.call import in_place
from tessera.ir.equation import Equation, Value
from tessera.ir.placement import PLAIN, Mark
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
    marks: dict[Value, Mark] = field(default_factory=dict)  # of values that are split otherwise than plainly
    packed: dict[Value, int] = field(default_factory=dict)  # blocks of weights of which each is best cut
    made: dict[Value, Value] = field(default_factory=dict)  # of a weight cut by columns, the product
    beside: dict[Value, list[Value]] = field(default_factory=dict)  # of such a weight, biases that are cut with it


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
        cuts.split.get(v) == d.index((inner,)) and v not in cuts.marks
        for v, d in zip(operands, rule.operands, strict=True)
        if (inner,) in d
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
    own = known[weight][0]
    cuts.split[eqn.out], cuts.of[eqn.out] = result.index((outer,)), frozenset((own,))
    cuts.made[own] = eqn.out
    for i, v in enumerate(operands):
        added = i in rule.addends and v in known and (outer,) in rule.operands[i]
        if added and _take(cuts, known, v, rule.operands[i].index((outer,)), ranks):
            cuts.beside.setdefault(own, []).append(known[v][0])


def _follow(eqn: Equation, rule: Factors, ranks: int, cuts: Cuts) -> None:
    """The results of an operator that may be cut where its operands are."""
    origins = frozenset(w for v in tensors(eqn) for w in cuts.of.get(v, ()))
    found = [
        _cut_of(rule, dims[cuts.split[v]], v, ranks, cuts)
        for v, dims in zip(tensors(eqn), rule.operands, strict=True)
        if v in cuts.split and dims[cuts.split[v]]
    ]
    if any(cut is not None and cut[0] in rule.whole for cut in found):
        cuts.lost |= origins
    factors = {cut[0] for cut in found if cut is not None and cut[0] not in rule.whole and cut[1] == PLAIN}
    if len(factors) != 1 or any(cut is not None and cut[1] != PLAIN for cut in found):
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
            if v is not None and factor in names and (mark := _mark(rule, names, factor)) is not None:
                cuts.split[v], cuts.of[v] = dim, origins
                if mark != PLAIN:
                    cuts.marks[v] = mark


def _mark(rule: Factors, dim: tuple[str, ...], factor: str) -> Mark | None:
    """How an axis that cuts a factor plainly cuts a dimension that is made of it and others."""
    before = [rule.sizes.get(f) for f in dim[: dim.index(factor)]]
    return Mark(math.prod(before)) if all(type(n) is int for n in before) else None  # type: ignore[arg-type]


def _cut_of(rule: Factors, dim: tuple[str, ...], v: Value, ranks: int, cuts: Cuts) -> tuple[str, Mark] | None:
    """The factor of a dimension that is cut, and how; of blocks that cannot be, what is inside of each, if the weight
    behind is packed so."""
    mark = cuts.marks.get(v, PLAIN)
    cut = rule.cut_by(dim, mark)
    if cut is None or mark != PLAIN or len(dim) == 1 or len(origin := cuts.of[v]) != 1:
        return cut
    (weight,) = origin
    blocks, size = rule.sizes.get(dim[0]), rule.sizes.get(dim[1])
    if not (type(blocks) is int and type(size) is int) or cuts.packed.get(weight, blocks) != blocks:
        return cut
    if weight not in cuts.made or v.shape[cuts.split[v]] != weight.shape[cuts.weights[weight]]:
        return cut
    plain = cut[0] not in rule.whole and blocks % ranks == 0
    if (plain and weight not in cuts.packed) or size % ranks or dim[1] in rule.whole:
        return cut
    cuts.packed[weight] = blocks
    return dim[1], PLAIN
