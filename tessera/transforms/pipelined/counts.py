"""Means over what counts: in a pipeline they are divided by the count of the whole batch, not of a microbatch's own.

In: a loss over a microbatch, which inputs are its batch, and which are buffers. Out: the same loss with one more input
for each count, its mean over all microbatches, and the program that counts in one of them. Then the mean of the
microbatches' losses is the loss of the whole batch, and so are gradients, however labels that are ignored lie.

    aten.div(sum, count)            ->  aten.div(sum, count_of_all)
    aten.cross_entropy_loss(x, y)   ->  that times count / count_of_all; nothing where nothing counts

A count is a sum or mean that the batch alone decides, or it and buffers that nobody writes. Where all microbatches have
as many, nothing changes by a bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Value, map_values
from tessera.ir.replay import sweep
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import draws
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.factors.rule import arguments
from tessera.ops.families import cast
from tessera.util.names import names

SAME = names("neg view reshape squeeze unsqueeze clone alias _to_copy to")
LOSSES = names("cross_entropy_loss nll_loss nll_loss_nd")
COUNTS = names("sum mean count_nonzero")
MEAN = 1


@dataclass(frozen=True)
class Counted:
    trace: Trace  # its last inputs are the counts of all
    counts: Trace  # of a microbatch


def counted(trace: Trace, batch: Sequence[Value], loss: Value, buffers: Collection[Value] = ()) -> Counted | None:
    """None where no count is the batch's. `buffers` are inputs that all stages have, such as weights of classes."""
    given = [*batch, *(v for v in buffers if v not in trace.mutations)]
    rewrite = _Rewrite(trace, loss, _of_batch(trace, given))
    here = rewrite.run()
    if not rewrite.counts:
        return None
    known = _of_batch(here, given)
    counts = here.with_(
        name="counts",
        inputs=tuple(given),
        equations=tuple(eqn for eqn in here.equations if known.issuperset(eqn.results())),
        outputs=tuple(rewrite.counts.values()),
        mutations={},
    )
    counts = sweep(counts)
    read = {v for eqn in counts.equations for v in eqn.inputs()}
    return Counted(here, counts.with_(inputs=(*batch, *(v for v in given[len(batch) :] if v in read))))


def _of_batch(trace: Trace, batch: Sequence[Value]) -> set[Value]:
    """What some inputs alone decide."""
    known = {*batch, *trace.constants}
    for eqn in trace.equations:
        if all(v in known for v in eqn.inputs()) and not draws(eqn.op, eqn.args, eqn.kwargs):
            known.update(eqn.results())
    return known


def _means(v: Value, makers: Mapping[Value, Equation], known: Collection[Value]) -> Iterator[Equation]:
    """The means of which a loss is a sum."""
    eqn = makers.get(v)
    if eqn is None or v in known or v.numel() != 1:
        return
    operands, name = eqn.inputs(), eqn.opname
    if name in ("add", "sub") or name in SAME or (name in ("mul", "div") and len(operands) == 1):
        for operand in operands:
            yield from _means(operand, makers, known)
    elif (name == "div" and operands[1] in known) or (name in LOSSES and _ignores(eqn, known)):
        yield eqn


def _ignores(eqn: Equation, known: Collection[Value]) -> bool:
    given = arguments(eqn)
    target, weight = given["target"], given.get("weight")
    return (
        given["reduction"] == MEAN and not target.tensor.is_float and target in known
        and (weight is None or weight in known)
    )  # fmt: skip


class _Rewrite:
    def __init__(self, trace: Trace, loss: Value, known: Collection[Value]) -> None:
        self.rewrite = Rewrite(trace)
        self.means = {eqn.out for eqn in _means(loss, self.rewrite.makers, known)}
        self.counts: dict[Value, Value] = {}  # of all microbatches, and which it is in each

    def run(self) -> Trace:
        for eqn in self.rewrite:
            if not eqn.many and eqn.out in self.means:
                with self.rewrite.at(eqn):
                    self.mean(eqn)
        return self.rewrite.finish(inputs=(*self.rewrite.trace.inputs, *self.counts))

    def mean(self, eqn: Equation) -> None:
        if eqn.opname != "div":
            self.rewrite.keep(eqn)
            self.rewrite.rename(eqn.out, self.shared(eqn))
        elif (count := self.over_all(eqn.inputs()[1], eqn.out)) is not None:
            self.rewrite.keep(eqn.with_(args=(eqn.args[0], count, *eqn.args[2:])))

    def over_all(self, count: Value, like: Value) -> Value | None:
        """A count made anew from sums over all microbatches; None where it is made of something else than sums."""
        if count.ndim:
            return None
        eqn = self.rewrite.makers.get(count)
        if eqn is None or not eqn.inputs():  # a number, the same for all
            return count
        if eqn.opname in COUNTS and any(v.ndim for v in eqn.inputs()):
            return self.of_all(count, like)
        parts = {v: self.over_all(v, like) for v in eqn.inputs()}
        if any(v is None for v in parts.values()):
            return None
        args, kwargs = map_values((eqn.args, eqn.kwargs), lambda v: parts[v])  # type: ignore[misc,return-value]
        out = emit(eqn.op, *args, **kwargs)
        return out if isinstance(out, Value) else None

    def of_all(self, count: Value, like: Value) -> Value:
        there = next((v for v, mine in self.counts.items() if mine is count), None)
        if there is None:
            dtype = count.dtype if count.tensor.is_float else like.dtype
            there = self.rewrite.builder.value(f"{count.name}_of_all", TensorType(dtype, (), (), count.tensor.device))
            self.counts[there] = count
        return there

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
        every = self.of_all(mine, loss)
        own = aten.where(aten.eq(mine, 0), aten.zeros_like(loss), loss)
        return aten.mul(own, cast(aten.div(mine, every), loss.dtype))
