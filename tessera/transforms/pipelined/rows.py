"""What an equation makes of the rows of a batch.

In: the same program captured twice, over a microbatch and over the whole batch. A dimension is one of rows where it is
longer in the whole. Out: which values have rows, and of an equation whether rows stay apart, are added up, or averaged;
or that a row sees others, so that a microbatch alone does not know what the whole batch would give.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tessera.ir.equation import Equation, Source, Value
from tessera.ir.schema import draws
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.factors.lookup import factors_of
from tessera.ops.factors.rule import Factors, arguments, tensors
from tessera.ops.factors.tried import tried
from tessera.util.names import names

OVER_CLASSES = names("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward multi_margin_loss")
NONE, MEAN, SUM = 0, 1, 2  # what losses call `reduction`


class How(Enum):
    APART = "each row alone"
    MEAN = "the mean of all rows"
    SUM = "the sum of all rows"
    TOGETHER = "a row sees others"


@dataclass(frozen=True)
class Seen:
    """An equation whose rows see those of their microbatch alone."""

    operator: str
    source: Source


@dataclass(frozen=True)
class Rows:
    """Of a program over a microbatch, its values over the whole batch."""

    count: int  # of microbatches
    whole: dict[Value, Value] = field(default_factory=dict)

    def dims(self, v: Value) -> list[int]:
        """The dimensions of rows."""
        there = self.whole.get(v, v)
        if not isinstance(v.type, TensorType) or not isinstance(there.type, TensorType):
            return []
        return [d for d, (n, m) in enumerate(zip(v.shape, there.shape, strict=True)) if n != m]

    def has(self, values: Collection[Value]) -> bool:
        return any(self.dims(v) for v in values)


def aligned(part: Trace, whole: Trace, count: int) -> Rows | None:
    """Values of the two meet by their order; None where the program depends on how many rows there are."""
    if len(part.equations) != len(whole.equations) or len(part.constants) != len(whole.constants):
        return None
    rows = Rows(count, dict(zip((*part.inputs, *part.constants), (*whole.inputs, *whole.constants), strict=True)))
    for a, b in zip(part.equations, whole.equations, strict=True):
        there = [rows.whole.get(v) for v in a.inputs()]
        if a.op != b.op or there != list(b.inputs()) or len(a.outputs) != len(b.outputs):
            return None
        pairs = [(v, w) for v, w in zip(a.outputs, b.outputs, strict=True) if v is not None and w is not None]
        rows.whole.update(pairs)
        if not all(_fits(v, w, count) for v, w in pairs):
            return None
    return rows


def _fits(v: Value, w: Value, count: int) -> bool:
    if not isinstance(v.type, TensorType) or not isinstance(w.type, TensorType):
        return type(v.type) is type(w.type)
    return v.ndim == w.ndim and all(n in (m, m * count) for m, n in zip(v.shape, w.shape, strict=True))


def how(eqn: Equation, whole: Equation, rows: Rows) -> How:
    """What an equation that is given rows makes of them; `whole` is the same one over the whole batch."""
    given = [rows.dims(v) for v in tensors(eqn)]
    reduction = arguments(whole).get("reduction")
    if isinstance(reduction, int):
        classes = whole.opname in OVER_CLASSES and tensors(whole)[0].ndim > 1 and 1 in given[0]
        if classes or any(len(dims) > 1 for dims in given):
            return How.TOGETHER
        return {NONE: How.APART, MEAN: How.MEAN, SUM: How.SUM}.get(reduction, How.TOGETHER)
    if draws(whole.op, whole.args, whole.kwargs):
        return How.APART
    rule = factors_of(whole) or tried(whole)
    return How.TOGETHER if rule is None else _by_rule(rule, eqn, given, rows)


def _by_rule(rule: Factors, eqn: Equation, given: Sequence[list[int]], rows: Rows) -> How:
    pairs = zip(eqn.outputs, rule.results, strict=True)
    results = [(v, dims) for v, dims in pairs if v is not None and dims is not None]
    sides = [*zip(given, rule.operands, strict=True), *((rows.dims(v), dims) for v, dims in results)]
    factors = {dims[d][0] for there, dims in sides for d in there if len(dims[d]) == 1}
    if len(factors) > 1 or factors & rule.whole:
        return How.TOGETHER
    kept = rows.has(eqn.results())
    if all(rows.dims(v) for v, _ in results):
        return How.APART
    combined = {rule.reduced.get(f) for f in factors}
    if kept or combined != {"sum"}:
        return How.TOGETHER
    return How.MEAN if eqn.opname == "mean" else How.SUM
