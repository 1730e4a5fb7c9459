"""Writes attention, two contractions with a softmax between them, as one loop over the keys.

In: a kernel in which `tile/rewrites/flash` finds attention. Out: the module's text, whose loop walks along the keys.
Whenever a larger score comes, what was summed so far is scaled down by the exponential of the difference. What follows
the division, and what is done to scores (scaling, masks, a bias), is written as it stands.
"""

from __future__ import annotations

from xdsl.dialects.builtin import Float32Type
from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect.ops import ContractOp, KernelOp
from tessera.tile.dialect.types import axes_of, element_of
from tessera.tile.rewrites.flash import after_keys, flash_of, is_causal, made_over
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.triton.emit import DEFAULT, Emitter, Options
from tessera.tile.targets.triton.layout import Dim
from tessera.tile.targets.triton.module import module_text
from tessera.tile.targets.triton.spaces import Space, Val

LEAST = "float('-inf')"


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
        dims = [d for d in self.layout.parallel if d.tensor and set(d.axes) & set(axes_of(v))]
        if len(dims) != 1 or dims[0].block < 16 or other.block < 16:
            raise NotImplementedError(f"expected blocks of 16 and more for both sides of a product, got {dims}")
        return dims[0]

    # --- the whole ---

    def module(self) -> str:
        self._programs()
        ops, axis = list(self.kernel.block.ops), self.reduced.axes[0]
        along = [op for op in ops if axis in made_over(op)]
        late = after_keys(self.kernel, self.parts)
        for op in ops:
            if op not in along and op not in late and op not in self.parts.ends:
                self._op(op, self._space(op))
        self._walk(along, late)
        for op in late:
            self._op(op, self.main)
        lines = [*self._widened(), *self.places.start, *self.body]
        return module_text(self.kernel, self.schedule, self.layout, self.function, self.buffers, self.places, lines)

    def _space(self, op: Operation) -> Space:
        """Where an operation stands, by the axes it varies over."""
        axes = made_over(op)
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
        wanted: dict[Operation, list[Space]] = {}
        fixed = {a for d in (*self.main.dims, self.layout.inner) if d for a in d.axes}
        for op in reversed(ops):
            if made_over(op) & fixed or op is self.parts.scores:
                wanted[op] = [self._space(op)]
            else:
                users = [s for r in op.results for u in r.uses for s in wanted.get(u.operation, [])]
                wanted[op] = list(dict.fromkeys(users)) or [self.score]
        return wanted

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
        wanted = self.parts.lowering
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
        name = self.namer.fresh(wanted)
        self._line(f"{name} = {text}")
        return name

    def _end(self) -> str:
        """Where the loop may stop: queries that see keys up to their own position need none after their block."""
        size = self.places.size(self.reduced.size)
        rows = self.main.dims[0]
        start = self.places.starts.get(rows.axes)
        if start is None or not is_causal(self.parts, rows.axes[0]):
            return size
        return f"tl.minimum({size}, {start} + {rows.block})"

    _start = Emitter._note_start
