"""What an equation makes of the rows of a batch.

In: the same program captured twice, over a microbatch and over the whole batch. A dimension is one of rows where it is
longer in the whole. Out: which values have rows, and of an equation whether rows stay apart, are added up, or averaged;
or that a row sees others, so that a microbatch alone does not know what the whole batch would give.

Which rows meet depends on their order: where a dimension is made of `blocks` that each hold the batch's rows, as two
that were joined or sequences before rows, a microbatch has its rows of each block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

from tessera.ir.alias import KEEP_GRAD
from tessera.ir.equation import Equation, Source, Value
from tessera.ir.placement import Mark
from tessera.ir.schema import draws, is_pointwise
from tessera.ir.trace import Trace
from tessera.ir.types import Size, TensorType
from tessera.ops.custom import AUTOGRAD_FUNCTION, ONCE
from tessera.ops.factors.lookup import factors_of
from tessera.ops.factors.rule import Factors, arguments, tensors
from tessera.ops.factors.tried import tried
from tessera.util.names import names

OVER_CLASSES = names("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward multi_margin_loss")
# Of numbers, whatever they are like.
MADE = names("zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like")
ALONG = names("cat split split_with_sizes chunk slice narrow")
AS_IT_IS = (KEEP_GRAD, ONCE)  # of our own operators, those that change no number
FILLED = names("full new_full full_like scalar_tensor")
ONE = Fraction(1)
CLOSE = 1e-9  # two floating-point numbers that are the same quotient of sizes
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
    fits: Callable[[Size, Size], bool]  # may a dimension be so long in the whole?
    whole: dict[Value, Value] = field(default_factory=dict)
    blocks: dict[Value, int] = field(default_factory=dict)  # of a dimension of rows, where there are several

    def dims(self, v: Value) -> list[int]:
        """The dimensions of rows."""
        there = self.whole.get(v, v)
        if not isinstance(v.type, TensorType) or not isinstance(there.type, TensorType):
            return []
        return [d for d, (n, m) in enumerate(zip(v.shape, there.shape, strict=True)) if n != m]

    def has(self, values: Collection[Value]) -> bool:
        return any(self.dims(v) for v in values)


def aligned(part: Trace, whole: Trace, count: int, fits: Callable[[Size, Size], bool] | None = None) -> Rows | None:
    """Values of the two meet by their order; None where the program depends on how many rows there are."""
    rows = Rows(count, fits or (lambda size, there: there in (size, size * count)))
    return rows if meet(part, whole, rows) else None


def meet(part: Trace, whole: Trace, rows: Rows) -> bool:
    pairs = [((*part.inputs, *part.constants), (*whole.inputs, *whole.constants))]
    for a, b in zip(part.equations, whole.equations, strict=False):
        subs = list(zip(_forward(a), _forward(b), strict=False))
        if a.op != b.op or len(a.inputs()) != len(b.inputs()) or not all(meet(*sub, rows) for sub in subs):
            return False
        pairs += [(a.inputs(), b.inputs()), (a.results(), b.results())]
    if len(part.equations) != len(whole.equations) or not all(len(a) == len(b) for a, b in pairs):
        return False
    every = [(v, w) for a, b in pairs for v, w in zip(a, b, strict=True)]
    return all(_fits(v, w, rows) and rows.whole.setdefault(v, w) is w for v, w in every)


def _forward(eqn: Equation) -> list[Trace]:
    """The sub-traces that an equation runs; of a function with a derivative of its own, the function."""
    subs = [a for a in eqn.args if isinstance(a, Trace)]
    return subs[:1] if eqn.op is AUTOGRAD_FUNCTION else subs


def _fits(v: Value, w: Value, rows: Rows) -> bool:
    if not isinstance(v.type, TensorType) or not isinstance(w.type, TensorType):
        return type(v.type) is type(w.type)
    return v.ndim == w.ndim and all(map(rows.fits, v.shape, w.shape))


def how(eqn: Equation, whole: Equation, rows: Rows) -> How:
    """What an equation that is given rows makes of them; `whole` is the same one over the whole batch."""
    given = [rows.dims(v) for v in tensors(eqn)]
    reduction = arguments(whole).get("reduction")
    if isinstance(reduction, int):
        classes = whole.opname in OVER_CLASSES and tensors(whole)[0].ndim > 1 and 1 in given[0]
        if classes or any(len(dims) > 1 for dims in given):
            return How.TOGETHER
        return {NONE: How.APART, MEAN: How.MEAN, SUM: How.SUM}.get(reduction, How.TOGETHER)
    if arguments(whole).get("scale_grad_by_freq"):  # gradients count how often a word occurs
        return How.TOGETHER
    if draws(whole.op, whole.args, whole.kwargs) or whole.op in AS_IT_IS:
        return How.APART
    if subs := list(zip(_forward(eqn), _forward(whole), strict=True)):
        return How.APART if all(_all_apart(*sub, rows) for sub in subs) else How.TOGETHER
    if eqn.opname in ALONG and given[0] == [dim := arguments(eqn).get("dim", 0) % max(tensors(eqn)[0].ndim, 1)]:
        return _joined(eqn, dim, rows) if eqn.opname == "cat" else _pieces(eqn, whole, dim, rows)
    rule = factors_of(whole) or tried(whole)
    return How.TOGETHER if rule is None else _by_rule(rule, eqn, given, rows)


def _all_apart(part: Trace, whole: Trace, rows: Rows) -> bool:
    return all(inside(a, b, rows) == How.APART for a, b in zip(part.equations, whole.equations, strict=True))


def inside(eqn: Equation, whole: Equation, rows: Rows) -> How:
    """The same of an equation of a sub-trace, where neither numbers nor places of rows are followed."""
    if quotient(eqn, whole) != ONE:
        return How.TOGETHER
    if rows.has(eqn.inputs()):
        return how(eqn, whole, rows)
    made = not rows.has(eqn.results()) or eqn.opname in MADE or draws(eqn.op, eqn.args, eqn.kwargs)
    return How.APART if made else How.TOGETHER


def _joined(eqn: Equation, dim: int, rows: Rows) -> How:
    """Rows behind rows."""
    parts = [(rows.dims(v), v.shape[dim], rows.blocks.get(v, 1)) for v in tensors(eqn)]
    if any(part != parts[0] for part in parts):
        return How.TOGETHER
    rows.blocks[eqn.out] = parts[0][2] * len(parts)
    return How.APART


def _pieces(eqn: Equation, whole: Equation, dim: int, rows: Rows) -> How:
    """Some of the blocks that a dimension is made of."""
    x, given = tensors(eqn)[0], arguments(eqn)
    length = x.shape[dim]
    assert isinstance(length, int)  # a pipeline has a program for every size
    block, start = length // rows.blocks.get(x, 1), given.get("start") or 0
    start += length if start < 0 else 0
    there = arguments(whole).get("start") or 0
    there += rows.whole[x].shape[dim] if there < 0 else 0
    if given.get("step", 1) != 1 or there != start * rows.count:
        return How.TOGETHER
    for v in eqn.results():
        size = v.shape[dim]
        assert isinstance(size, int)
        if rows.dims(v) != [dim] or start % block or size % block:
            return How.TOGETHER
        rows.blocks[v] = size // block
        start += size
    return How.APART


def _by_rule(rule: Factors, eqn: Equation, given: Sequence[list[int]], rows: Rows) -> How:
    cuts = {
        rule.cut_by(names[d], Mark(rows.blocks.get(v, 1))) if names[d] else None
        for v, there, names in zip(tensors(eqn), given, rule.operands, strict=True) for d in there
    }  # fmt: skip
    cut = cuts.pop() if len(cuts) == 1 else None
    if cut is None or cut[0] in rule.whole:
        return How.TOGETHER
    factor, kept = cut[0], []
    for v, dims in zip(eqn.outputs, rule.results, strict=True):
        if v is None or dims is None:
            continue
        at = [d for d, names in enumerate(dims) if factor in names]
        if at != rows.dims(v):
            return How.TOGETHER
        kept.append(bool(at))
        for d in at:
            rows.blocks[v] = cut[1].blocks * _before(rule, dims[d], factor)
    if all(kept):
        return How.APART
    if any(kept) or rule.reduced.get(factor) != "sum":
        return How.TOGETHER
    return How.MEAN if eqn.opname == "mean" else How.SUM


def _before(rule: Factors, names: Sequence[str], factor: str) -> int:
    """How many blocks a dimension has that is made of several, of which rows are not the first."""
    return math.prod(int(rule.sizes[f]) for f in names[: names.index(factor)])


def quotient(eqn: Equation, whole: Equation) -> Fraction | None:
    """How many times a result over the whole batch is what it is over a microbatch, by the numbers it is made with.
    None where that is no quotient."""
    filled = eqn.opname in FILLED
    if not (filled or is_pointwise(eqn.op)) or not (numbers := list(_numbers(eqn, whole))):
        return ONE
    if len(numbers) > 1 or not (filled or (eqn.opname in ("mul", "div") and len(tensors(eqn)) == 1)):
        return None
    ((mine, all_),) = numbers
    if not mine or not all_:
        return None
    return near(mine / all_ if eqn.opname == "div" else all_ / mine)


def near(quotient: float) -> Fraction:
    """As a quotient of sizes."""
    near = Fraction(quotient).limit_denominator(1 << 20)
    return near if abs(float(near) / quotient - 1) < CLOSE else Fraction(quotient)


def _numbers(eqn: Equation, whole: Equation) -> list[tuple[float, float]]:
    """Numbers among the arguments that differ."""
    pairs = [*zip(eqn.args, whole.args, strict=True), *((x, whole.kwargs[name]) for name, x in eqn.kwargs.items())]
    return [
        (a, b) for a, b in pairs if isinstance(a, (int, float)) and isinstance(b, (int, float)) and a != b and a == a
    ]
