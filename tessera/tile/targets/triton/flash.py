"""Writes attention, two contractions with a softmax between them, as one loop over the keys.

In: a kernel with an inner axis (the head's width, see `schedule.inner_axis`): scores are contracted along it, their
maximum is subtracted, and the exponentials are summed and contracted along the keys, which the loop walks. Out: the
module's text. Whenever a larger score comes, what was summed so far is scaled down by the exponential of the
difference. What follows the division, and what is done to scores (scaling, masks, a bias), is written as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects.builtin import Float32Type
from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect import (
    ApplyOp,
    CastOp,
    ConstantOp,
    ContractOp,
    IotaOp,
    KernelOp,
    LoadOp,
    ReduceOp,
    StoreOp,
    ValueType,
    axes_of,
    element_of,
)
from tessera.tile.index import name
from tessera.tile.schedule import Schedule, inner_axis, reduced_axis
from tessera.tile.targets.triton.emit import DEFAULT, Emitter, Options, Val
from tessera.tile.targets.triton.layout import Dim
from tessera.tile.targets.triton.module import module_text
from tessera.tile.targets.triton.product import zero_outside
from tessera.tile.targets.triton.spaces import Space
from tessera.tile.targets.triton.values import number

LEAST = "float('-inf')"


@dataclass(frozen=True)
class Flash:
    """The operations of a kernel that make it attention."""

    scores: ContractOp
    top: ReduceOp  # the maximum of what is done to the scores
    low: SSAValue  # what is subtracted: the maximum, or something made of it row by row
    below: ApplyOp  # the difference
    total: ReduceOp
    result: ContractOp

    @property
    def ends(self) -> tuple[Operation, Operation, Operation]:
        """What the loop gives."""
        return self.top, self.total, self.result


def flash_of(kernel: KernelOp) -> Flash:
    """The parts of attention in a kernel with an inner axis; refuses what is anything else."""
    axis, inner = reduced_axis(kernel), inner_axis(kernel)
    ops = list(kernel.block.ops)
    products = [op for op in ops if isinstance(op, ContractOp)]
    sums = [op for op in ops if isinstance(op, ReduceOp)]
    scores = [op for op in products if op.axis.data == inner]
    results = [op for op in products if op.axis.data == axis]
    tops, totals = ([op for op in sums if op.kind.data == kind] for kind in ("max", "sum"))
    if not len(scores) == len(results) == len(tops) == len(totals) == 1 or len(sums) != 2:
        raise NotImplementedError("expected two products, a maximum and a sum between them")
    e = totals[0].arg.owner
    below = e.args[0].owner if isinstance(e, ApplyOp) and e.fn.data == "exp" else None
    if not (isinstance(e, ApplyOp) and isinstance(below, ApplyOp) and below.fn.data == "sub"):
        raise NotImplementedError("expected the exponential of a difference under the sum")
    weights = results[0].lhs.owner.arg if isinstance(results[0].lhs.owner, CastOp) else results[0].lhs
    if weights is not e.result or below.args[0] is not tops[0].arg or axis in axes_of(below.args[1]):
        raise NotImplementedError("expected the maximum of the scores to be subtracted, and the products to use that")
    for op in (scores[0], results[0]):
        if not all(zero_outside(v) or v is results[0].lhs for v in (op.lhs, op.rhs)):
            raise NotImplementedError("expected products of what is loaded")
    if any(isinstance(op, StoreOp) and axis in _axes(op) for op in ops):
        raise NotImplementedError("expected nothing to be stored for every key: the loop knows scores only so far")
    return Flash(scores[0], tops[0], below.args[1], below, totals[0], results[0])


def write_flash(kernel: KernelOp, schedule: Schedule, options: Options = DEFAULT) -> str:
    return _Flash(kernel, schedule, options).module()


class _Flash(Emitter):
    def __init__(self, kernel: KernelOp, schedule: Schedule, options: Options) -> None:
        super().__init__(kernel, schedule, options)
        self.parts = flash_of(kernel)
        reduced, inner = self.layout.reduced, self.layout.inner
        assert reduced is not None and inner is not None
        rows, columns = self._side(self.parts.scores.lhs, inner), self._side(self.parts.result.rhs, reduced)
        self.reduced = reduced
        self.main = Space((rows, columns))
        self.queries, self.keys = Space((rows, inner), "_q"), Space((inner, reduced), "_k")
        self.score, self.rhs = Space((rows, reduced)), Space((reduced, columns), "_v")

    def _side(self, v: SSAValue, other: Dim) -> Dim:
        """The dim of blocks that an operand varies over beside the one that is summed over."""
        found = [d for d in self.layout.parallel if d.tensor and set(d.axes) & set(axes_of(v))]
        if len(found) != 1 or found[0].block < 16 or other.block < 16:
            raise NotImplementedError(f"expected blocks of 16 and more for both sides of a product, got {found}")
        return found[0]

    # --- the whole ---

    def module(self) -> str:
        self._programs()
        ops, axis = list(self.kernel.block.ops), self.reduced.axes[0]
        along = [op for op in ops if axis in _axes(op)]
        late = self._late()
        for op in ops:
            if op not in along and op not in late and op not in self.parts.ends:
                self._op(op, self._space(op))
        self._walk(along, late)
        for op in late:
            self._op(op, self.main)
        lines = [*self._widened(), *self.places.start, *self.body]
        return module_text(self.kernel, self.schedule, self.layout, self.function, self.buffers, self.places, lines)

    def _late(self) -> list[Operation]:
        """What waits for what the loop gives."""
        made: set[Operation] = set(self.parts.ends)
        axis = self.reduced.axes[0]
        for op in self.kernel.block.ops:
            if axis not in _axes(op) and made & {v.owner for v in op.operands}:
                made.add(op)
        return [op for op in self.kernel.block.ops if op in made and op not in self.parts.ends]

    def _space(self, op: Operation) -> Space:
        """Where an operation stands, by the axes it varies over."""
        axes = _axes(op)
        over = {dim: bool(set(dim.axes) & axes) for dim in self.layout.dims}
        rows, columns = self.main.dims
        assert self.layout.inner is not None
        if over[self.layout.inner]:
            return self.keys if over[self.reduced] else self.queries
        if over[self.reduced]:
            return self.rhs if over[columns] else self.score
        return self.main

    def _spaces_along(self, ops: list[Operation]) -> dict[Operation, list[Space]]:
        """What varies along the keys alone is wanted wherever something that reads it stands."""
        found: dict[Operation, list[Space]] = {}
        fixed = {a for d in (*self.main.dims, self.layout.inner) if d for a in d.axes}
        for op in reversed(ops):
            if _axes(op) & fixed or op is self.parts.scores:
                found[op] = [self._space(op)]
            else:
                users = [s for r in op.results for u in r.uses for s in found.get(u.operation, [])]
                found[op] = list(dict.fromkeys(users)) or [self.score]
        return found

    # --- the loop ---

    def _walk(self, ops: list[Operation], late: list[Operation]) -> None:
        dim, rows, block = self.reduced, frozenset(self.main.dims[:1]), frozenset(self.main.dims)
        top, total, acc = (self.namer.fresh(text) for text in ("top", "total", "acc"))
        self.body += [
            f"{top} = tl.full({self.main.shape(rows)}, {LEAST}, tl.float32)",
            f"{total} = tl.zeros({self.main.shape(rows)}, tl.float32)",
            f"{acc} = tl.zeros({self.main.shape(block)}, tl.float32)",
        ]
        first = self.places.starts[dim.axes] = self.namer.fresh(f"{dim.axes[0]}0")
        outside, lines = dict(self.values), []
        self.spaces = self._spaces_along(ops)
        self.places.enter(lines, dim)
        for op in ops:
            if op is self.parts.below:
                self._larger(top, late)
            for space in self.spaces[op]:
                self._scores(op) if op is self.parts.scores else self._op(op, space)
        self._gather(top, total, acc)
        self.places.leave()
        self.body += [f"for {first} in range(0, {self._end()}, {dim.block}):", *("    " + line for line in lines)]
        self.values = outside
        for op, text, dims in zip(self.parts.ends, (top, total, acc), (rows, rows, block), strict=True):
            self.values[op.results[0], self.main] = Val(text, dims)

    def _scores(self, op: ContractOp) -> None:
        left, right = self._typed(op.lhs, self.queries), self._typed(op.rhs, self.keys)
        self._bind(op, self.score, f"tl.dot({left}, {right}{self._exact(op.lhs)})", frozenset(self.score.dims))

    def _exact(self, v: SSAValue) -> str:
        return self._precision() if isinstance(element_of(v), Float32Type) else ""

    def _larger(self, top: str, late: list[Operation]) -> None:
        """The largest score so far, and what is subtracted for it."""
        x = self.parts.top.arg
        if self.reduced.masked:  # past the last key there is no score
            held = self._value(x, self.score)
            text = f"tl.where({self.places.inside(self.reduced, self.score)}, {held.text}, {LEAST})"
            self.values[x, self.score] = Val(self._named("score", text), held.dims)
        text = f"tl.maximum({top}, tl.max({self._value(x, self.score).text}, 1, keep_dims=True))"
        self.values[self.parts.top.result, self.main] = Val(
            self._named(f"{top}_here", text), frozenset(self.main.dims[:1])
        )
        wanted = _leading(self.parts.low, self.parts.top)
        for op in late:
            if op in wanted:
                self._op(op, self.main)

    def _gather(self, top: str, total: str, acc: str) -> None:
        """This step's keys into what was gathered before, which fades as the largest score grows."""
        op = self.parts.result
        fade = self._named("fade", f"tl.exp({top} - {self._value(self.parts.low, self.score).text})")
        weights = self._value(self.parts.total.arg, self.score).text
        self._line(f"{total} = {total} * {fade} + tl.sum({weights}, 1, keep_dims=True)")
        left, right = self._typed(op.lhs, self.score), self._typed(op.rhs, self.rhs)
        self._line(f"{acc} = tl.dot({left}, {right}, {acc} * {fade}{self._exact(op.rhs)})")
        self._line(f"{top} = {self._value(self.parts.top.result, self.main).text}")

    def _named(self, wanted: str, text: str) -> str:
        made = self.namer.fresh(wanted)
        self._line(f"{made} = {text}")
        return made

    def _end(self) -> str:
        """Where the loop may stop: queries that see keys up to their own position need none after their block."""
        size = self.places.size(self.reduced.size)
        rows, axis = self.main.dims[0], self.reduced.axes[0]
        start = self.places.starts.get(rows.axes)
        if start is None or not any(_is_causal(test, rows.axes[0], axis) for test in _tests(self.parts.top.arg)):
            return size
        return f"tl.minimum({size}, {start} + {rows.block})"

    def _start(self, dim: Dim, first: str) -> None:
        self.places.starts[dim.axes] = self._assign(self.places.start, f"at_{''.join(dim.axes)}", first)


def _leading(v: SSAValue, start: Operation) -> set[Operation]:
    """The operations that make a value out of another's result."""
    found: set[Operation] = set()
    stack = [v.owner]
    while stack:
        op = stack.pop()
        if isinstance(op, Operation) and op is not start and op not in found:
            found.add(op)
            stack += [x.owner for x in op.operands]
    return found


def _tests(score: SSAValue) -> Iterator[SSAValue]:
    """The conditions under which a score is one at all: select(condition, score, -inf), one inside the other."""
    op = score.owner
    while isinstance(op, ApplyOp) and op.fn.data == "select":
        other = op.args[2].owner
        if not (isinstance(other, ConstantOp) and number(other.value) == LEAST):
            return
        yield op.args[0]
        op = op.args[1].owner


def _is_causal(test: SSAValue, rows: str, axis: str) -> bool:
    """key <= row"""
    op = test.owner
    if not isinstance(op, ApplyOp) or op.fn.data != "le":
        return False
    sides = [v.owner for v in op.args]
    return all(isinstance(s, IotaOp) for s in sides) and [s.at.expr for s in sides] == [name(axis), name(rows)]  # type: ignore[union-attr]


def _axes(op: Operation) -> set[str]:
    found = {a for r in op.results if isinstance(r.type, ValueType) for a in r.type.axis_names}
    if isinstance(op, StoreOp):
        found |= set(op.at.expr.names()) | set(axes_of(op.value))
    if isinstance(op, LoadOp):
        found |= set(op.at.expr.names()) & set(axes_of(op.result))
    return found
