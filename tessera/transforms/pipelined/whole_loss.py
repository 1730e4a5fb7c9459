"""A loss over a microbatch whose mean over all microbatches is the loss of the whole batch.

In: a loss as it was captured over a microbatch and over the whole batch, which inputs are its batch, and which are
buffers. Out: the loss over a microbatch as it must be written, so that its mean, and that of its gradients, are those
of the whole batch however rows lie; what counts in a microbatch, whose sums over all are further inputs; and the
equations that see a microbatch alone, where no way of writing them helps.

    aten.sum(x)                     ->  that times the number of microbatches, at the end
    aten.sum(mask)                  ->  mask_sum_of_all, an input
    aten.cross_entropy_loss(x, y)   ->  that times count / count_of_all; nothing where nothing counts

Of every value there is a number, `scale`: the whole batch has scale times what a microbatch has; of what has no rows
and depends on weights too, scale times the mean of what microbatches have. Numbers that are sizes of the batch differ
between the two captures, so a sum over a size has a scale of one. A count is a sum or mean that the batch alone
decides, or it and buffers that nobody writes. A mean of as many in all microbatches stays as it is, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from tessera.ir.builder import aten
from tessera.ir.check import RAISE_IF
from tessera.ir.equation import Equation, Source, Value, map_values, values_in
from tessera.ir.replay import sweep
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import draws, is_view
from tessera.ir.trace import Trace
from tessera.ops.factors.lookup import factors_of
from tessera.ops.factors.rule import arguments, tensors
from tessera.ops.families import cast
from tessera.transforms.pipelined.derivatives import pulled_apart
from tessera.transforms.pipelined.rows import MADE, ONE, How, Rows, Seen, aligned, how, near, quotient
from tessera.util.names import names

BY_CLASS = names("cross_entropy_loss nll_loss nll_loss_nd")
BAGS = names("embedding_bag _embedding_bag")  # given rows of equal lengths, where offsets count up
AFFINE = names("add sub rsub")  # with a number


@dataclass(frozen=True)
class Written:
    trace: Trace  # its last inputs are the counts of all
    counts: Trace | None  # of a microbatch
    seen: tuple[Seen, ...]  # what sees a microbatch alone


def written(
    trace: Trace,
    whole: Trace,
    microbatches: int,
    batch: Sequence[Value],
    buffers: Collection[Value] = (),
    pulled: bool = True,
) -> Written | None:
    """`buffers` are inputs that all stages have, such as weights of classes; `pulled` says that gradients are taken.
    None where the two are no one program."""
    rows = aligned(trace, whole, microbatches)
    if rows is None:
        return None
    given = [*batch, *(v for v in buffers if v not in trace.mutations)]
    walk = _Alignment(trace, whole, rows, given, pulled)
    here = walk.run()
    if not walk.counts:
        return Written(here, None, tuple(walk.seen.values()))
    known = _known(here, given)
    counts = here.with_(
        name="counts",
        inputs=tuple(given),
        equations=tuple(eqn for eqn in here.equations if eqn.results() and known.issuperset(eqn.results())),
        outputs=tuple(walk.counts.values()),
        mutations={},
    )
    counts = sweep(counts)
    read = {v for eqn in counts.equations for v in eqn.inputs()}
    counts = counts.with_(inputs=(*batch, *(v for v in given[len(batch) :] if v in read)))
    return Written(here, counts, tuple(walk.seen.values()))


def _known(trace: Trace, given: Collection[Value]) -> set[Value]:
    """What some inputs alone decide."""
    known = {*given, *trace.constants}
    for eqn in trace.equations:
        if all(v in known for v in eqn.inputs()) and not draws(eqn.op, eqn.args, eqn.kwargs):
            known.update(eqn.results())
    return known


class _Alignment:
    def __init__(self, trace: Trace, whole: Trace, rows: Rows, given: Sequence[Value], pulled: bool) -> None:
        self.rewrite, self.whole, self.rows, self.pulled = Rewrite(trace), whole, rows, pulled
        self.known = _known(trace, given)
        self.counted = {*given, *trace.constants}  # what is known of a microbatch before others are asked
        self.touched = {v for v in trace.inputs if rows.dims(v)}  # the batch decides it, or decides it too
        self.means: set[Value] = set()  # what has no rows and is right in the mean alone
        self.scale: dict[Value, Fraction] = {}
        self.places: set[Value] = set()  # numbers that differ between rows, such as which row it is
        self.counts: dict[Value, Value] = {}  # of all microbatches, and which it is in each
        self.seen: dict[Source, Seen] = {}  # of a line, the first

    def run(self) -> Trace:
        trace = self.rewrite.trace
        self.constants(self.whole.constants.values())
        for eqn, here, whole in zip(trace.equations, self.rewrite, self.whole.equations, strict=True):
            if any(v in self.touched for v in eqn.inputs()) or self.rows.has(eqn.results()):
                self.touched.update(eqn.results())
                self.equation(eqn, here, whole)
            else:
                self.counts_from(eqn)
                self.scaled(eqn, quotient(eqn, whole))
        for buffer, v in trace.mutations.items():
            if (maker := self.rewrite.makers.get(v)) is not None:
                self.note(maker, f"{buffer.name}, which every microbatch writes,")
        renamed = {v: self.times(v) for v in dict.fromkeys(values_in(trace.outputs)) if self.scale_of(v) != ONE}
        outputs = map_values(trace.outputs, lambda v: renamed.get(v, self.rewrite.renamed.get(v, v)))
        return self.rewrite.finish(outputs=outputs, inputs=(*trace.inputs, *self.counts))

    def constants(self, whole: Iterable[Tensor]) -> None:
        """Tensors that were made of sizes of the batch."""
        for (v, mine), all_ in zip(self.rewrite.trace.constants.items(), whole, strict=True):
            if self.rows.dims(v):
                self.touched.add(v)
                times = [n // m for m, n in zip(mine.shape, all_.shape, strict=True)]
                if not torch.equal(mine.repeat(times), all_):
                    self.places.add(v)
            elif mine.numel() == all_.numel() == 1 and mine.item() and all_.item():
                self.scale[v] = near(all_.item() / mine.item())

    def note(self, eqn: Equation, what: str = "") -> None:
        self.seen.setdefault(eqn.source, Seen(what or str(eqn.op), eqn.source))

    def scaled(self, eqn: Equation, by: Fraction | None) -> None:
        if by is None:
            self.note(eqn, f"{eqn.op} of a number that depends on how many rows there are")
        elif by != ONE:
            self.scale.update(dict.fromkeys(eqn.results(), by))

    def times(self, v: Value) -> Value:
        """An output as it is over the whole batch."""
        with self.rewrite.at(self.rewrite.makers[v]):
            return aten.mul(self.rewrite.renamed.get(v, v), float(self.scale_of(v)))

    def scale_of(self, v: Value) -> Fraction:
        return self.scale.get(v, ONE)

    def equation(self, eqn: Equation, here: Equation, whole: Equation) -> None:
        own = self.own_row(eqn)
        if not own and self.places.intersection(eqn.inputs()):
            self.places.update(eqn.results())
            if not is_view(eqn.op):
                self.note(eqn, f"{eqn.op} of which row it is")
        if eqn.opname == "arange":
            self.places.update(eqn.results())
        free = own or eqn.opname in MADE or not self.rows.has(eqn.inputs())
        way = How.APART if free or self.refuses(eqn) else how(eqn, whole, self.rows)
        if way == How.TOGETHER:
            self.note(eqn)
            self.even(here, [self.scale_of(v) for v in tensors(eqn)])
        elif eqn.inputs() and all(v in self.known for v in eqn.inputs()):
            self.of_batch(eqn, here, whole, way)
        elif way == How.APART:
            if self.pulled and not pulled_apart(eqn, whole, self.rows):
                self.note(eqn, f"the derivative of {eqn.args[1].name}")  # type: ignore[union-attr]
            self.differ(eqn, here, whole)
        else:
            self.reduced(eqn, here, way)

    def refuses(self, eqn: Equation) -> bool:
        """A check that fails for the whole batch where it fails for some microbatch."""
        when = {"any": True, "all": False}.get(eqn.opname)
        if when is None or eqn.out in self.rewrite.results:
            return False
        return all(user.op is RAISE_IF and user.args[1] is when for user in self.rewrite.users.get(eqn.out, ()))

    def own_row(self, eqn: Equation) -> bool:
        """Every row looks something up in itself, or sums up its own words."""
        if eqn.opname in BAGS and isinstance(offsets := eqn.args[2], Value):
            return self.counts_up(offsets)
        if eqn.opname != "index" or not isinstance(x := eqn.args[0], Value) or x in self.places:
            return False
        at = [d for d, index in enumerate(eqn.args[1]) if index in self.places]  # type: ignore[arg-type]
        return at == self.rows.dims(x)

    def counts_up(self, offsets: Value) -> bool:
        """As where bags are of one length."""
        maker = self.rewrite.makers.get(offsets)
        if maker is not None and maker.opname == "detach":
            return self.counts_up(maker.args[0])  # type: ignore[arg-type]
        constant = self.rewrite.trace.constants.get(offsets)
        if constant is not None:
            return not constant.diff(n=2).any() and not constant[:1].any()
        return maker is not None and maker.opname == "arange" and not arguments(maker).get("start")

    # --- what the batch alone decides ---

    def of_batch(self, eqn: Equation, here: Equation, whole: Equation, way: How) -> None:
        if way == How.APART:
            self.counts_from(eqn)
            self.differ(eqn, here, whole)
            return
        if eqn.many or eqn.out.ndim or not self.counted.issuperset(eqn.inputs()):
            self.note(eqn)
            return
        self.rewrite.keep(here)
        with self.rewrite.at(eqn):
            total = self.of_all(here.out)
            self.rewrite.rename(eqn.out, total if way == How.SUM else aten.div(total, self.rows.count))
        self.scaled(eqn, self.sum_of(eqn))

    def counts_from(self, eqn: Equation) -> None:
        if self.known.issuperset(eqn.results()) and self.counted.issuperset(eqn.inputs()):
            self.counted.update(eqn.results())

    def of_all(self, count: Value) -> Value:
        """The sum of a count over all microbatches."""
        there = next((v for v, mine in self.counts.items() if mine is count), None)
        if there is None:
            there = self.rewrite.builder.value(f"{count.name}_of_all", count.type)
            self.counts[there] = count
        return there

    # --- what weights decide too ---

    def reduced(self, eqn: Equation, here: Equation, way: How) -> None:
        """Rows are added up."""
        if any(v in self.means for v in eqn.inputs()):
            self.note(eqn)
        self.means.update(eqn.results())
        self.scaled(eqn, self.sum_of(eqn) * (self.rows.count if way == How.SUM else 1))
        if way == How.MEAN and eqn.opname in BY_CLASS and not arguments(eqn)["target"].tensor.is_float:
            target, weight = arguments(eqn)["target"], arguments(eqn).get("weight")
            if not self.counted.issuperset(v for v in (target, weight) if v is not None):
                self.note(eqn, f"{eqn.op}, whose labels the batch alone does not decide")
                return
            self.rewrite.keep(here)
            with self.rewrite.at(eqn):
                self.rewrite.rename(eqn.out, self.shared(here))

    def sum_of(self, eqn: Equation) -> Fraction:
        """The scale of what is added up."""
        scales = [self.scale_of(v) for v in tensors(eqn)]
        if all(s == ONE for s in scales):
            return ONE
        group = self.linear(eqn, scales)
        if group is None or len({scales[i] for i in group}) > 1:
            self.note(eqn)
            return ONE
        return scales[min(group)]

    def shared(self, eqn: Equation) -> Value:
        """A mean's share of the mean over everything."""
        given, loss = arguments(eqn), eqn.out
        target, weight, ignored = given["target"], given.get("weight"), given["ignore_index"]
        valid = aten.ne(target, ignored)
        wide = torch.promote_types(loss.dtype, torch.float32)
        ones = cast(valid, wide)
        if weight is not None:
            safe = aten.where(valid, target, aten.zeros_like(target))
            ones = aten.mul(ones, cast(aten.squeeze(aten.embedding(aten.unsqueeze(weight, 1), safe), [-1]), wide))
        mine = aten.sum(ones)
        every = aten.div(self.of_all(mine), self.rows.count)
        own = aten.where(aten.eq(mine, 0), aten.zeros_like(loss), loss)
        return aten.mul(own, cast(aten.div(mine, every), loss.dtype))

    def differ(self, eqn: Equation, here: Equation, whole: Equation) -> None:
        """Rows stay apart, or there are none any more."""
        mean = any(v in self.means for v in eqn.inputs())
        if mean and self.rows.has(eqn.results()):
            self.note(eqn)
            return
        if mean:
            self.means.update(eqn.results())
        operands = tensors(eqn)
        scales, by = [self.scale_of(v) for v in operands], quotient(eqn, whole)
        if by is not None and self.multiplies(eqn):
            by *= math.prod(scales) if eqn.opname == "mul" else scales[0] / math.prod(scales[1:])
        elif by is not None and (mean or any(s != ONE for s in scales)):
            group = self.linear(eqn, scales)
            if group is None and eqn.opname not in AFFINE:
                self.note(eqn)
            if group is None or len({scales[i] for i in group}) > 1:
                self.even(here, scales)
            else:
                by *= scales[min(group)]
        self.scaled(eqn, by)

    def multiplies(self, eqn: Equation) -> bool:
        """A product with one factor at most that is right in the mean alone, or a quotient by what is exact."""
        mean = [v in self.means for v in tensors(eqn)]
        return eqn.opname == "mul" and sum(mean) < 2 or eqn.opname == "div" and not any(mean[1:])

    def linear(self, eqn: Equation, scales: Sequence[Fraction]) -> frozenset[int] | None:
        """The operands, among them all that are scaled or right in the mean, in which it is linear together."""
        operands = tensors(eqn)
        special = {i for i, v in enumerate(operands) if v in self.means or scales[i] != ONE}
        rule = factors_of(eqn)
        groups = rule.linear if rule is not None else ()
        return next((group for group in groups if special <= group), None)

    def even(self, here: Equation, scales: Sequence[Fraction]) -> None:
        """What a microbatch has is taken for as much of the whole batch: then operands can be added."""
        scaled = {v: s for v, s in zip(tensors(here), scales, strict=True) if s != ONE}
        if scaled:
            with self.rewrite.at(here):
                even = {v: aten.mul(v, float(s)) for v, s in scaled.items()}
            self.rewrite.keep(here.substitute(even))
