"""Writes matrix products as persistent programs over tiles.

In: a kernel whose contractions all lie in one loop along the reduced axis, with pointwise work after it, and a schedule
with `persistent`. Out: the module's text. As many programs run as the chip has multiprocessors, each walking over tiles
in an order that keeps the second-level cache warm; operands come by bulk copies where they can (`bulk`). What follows
the loop is written in `parts` of the tile's columns, so that it needs fewer registers beside the accumulator.
"""

from __future__ import annotations

from dataclasses import replace

from xdsl.ir import Operation

from tessera.tile.dialect.ops import ContractOp, KernelOp, LoadOp, StoreOp
from tessera.tile.dialect.types import axes_of, element_of
from tessera.tile.schedules.schedule import Pass, Schedule, inner_axis, plan, reduced_axis
from tessera.tile.targets.triton.bulk import Bulk, bulk_of
from tessera.tile.targets.triton.emit import DEFAULT, Emitter, Options, emit
from tessera.tile.targets.triton.flash import write_flash
from tessera.tile.targets.triton.functions import signature_name
from tessera.tile.targets.triton.layout import Dim, layout, needs_wide
from tessera.tile.targets.triton.module import module_text
from tessera.tile.targets.triton.product import dot_spaces
from tessera.tile.targets.triton.spaces import Space, Val


def write(kernel: KernelOp, schedule: Schedule, options: Options = DEFAULT) -> str:
    """The module's text: as tiles of a product where the schedule asks for it and the kernel is one."""
    if inner_axis(kernel) is not None:
        return write_flash(kernel, schedule, options)
    if not (schedule.persistent and walks_tiles(kernel, schedule)):
        return emit(kernel, replace(schedule, persistent=False), options)
    if not options.wide and needs_wide(kernel, {}):
        options = replace(options, wide=True)
    return _Tiles(kernel, schedule, options).module()


def walks_tiles(kernel: KernelOp, schedule: Schedule) -> bool:
    """One loop of products on the matrix units, and nothing stored inside of it."""
    if reduced_axis(kernel) is None or not schedule.loop or dot_spaces(kernel, layout(kernel, schedule)) is None:
        return False
    loops = [step for step in plan(kernel) if step.axis is not None]
    ends = [op for op in loops[0].ops if isinstance(op, StoreOp) or not _feeds(op)]
    return len(loops) == 1 and all(isinstance(op, ContractOp) for op in ends)


def _feeds(op: Operation) -> bool:
    """Its result varies along the reduced axis: it is on the way to a product."""
    return not isinstance(op, ContractOp) and reduced_axis(op.parent_op()) in axes_of(op.results[0])  # type: ignore[arg-type]


def bulks(kernel: KernelOp, schedule: Schedule) -> dict[LoadOp | StoreOp, Bulk]:
    """Every access that can be a bulk copy under this schedule."""
    if not dict(schedule.extra).get("bulk") or not schedule.persistent or not walks_tiles(kernel, schedule):
        return {}
    return _Tiles(kernel, schedule, DEFAULT).bulks


class _Tiles(Emitter):
    def __init__(self, kernel: KernelOp, schedule: Schedule, options: Options) -> None:
        super().__init__(kernel, schedule, options)
        assert self.dot is not None
        switches = dict(schedule.extra)
        self.parts = int(switches.get("parts", 1))  # type: ignore[call-overload]
        self.switches = switches
        rows, columns = self.main.dims
        self.part = Space((rows, replace(columns, block=columns.block // self.parts)))
        self.bulks: dict[LoadOp | StoreOp, Bulk] = {}
        if switches.get("bulk"):
            self._find()
        self.descriptors: dict[Bulk, str] = {}
        for b in self.bulks.values():
            if b not in self.descriptors:
                self.descriptors[b] = self.namer.fresh(f"{self.buffers[b.buffer]}_tiles")

    def _find(self) -> None:
        assert self.dot is not None
        axis = reduced_axis(self.kernel)
        epilogue = replace(self.layout, parallel=self._parallel(self.part.dims[1]))
        for op in self.kernel.block.ops:
            if not isinstance(op, (LoadOp, StoreOp)):
                continue
            along = isinstance(op, LoadOp) and axis in axes_of(op.result)
            space = (self.dot.space_of(op) or self.dot.first) if along else self.part
            if (bulk := bulk_of(self.kernel, self.layout if along else epilogue, op, space)) is not None:
                self.bulks[op] = bulk

    def _parallel(self, columns: Dim) -> tuple[Dim, ...]:
        return tuple(columns if d is self.main.dims[1] else d for d in self.layout.parallel)

    # --- the whole ---

    def module(self) -> str:
        self._programs()
        whole = self.layout
        loop = next(step for step in plan(self.kernel) if step.axis is not None)
        before = _needed(self.kernel, loop)
        for op in before:
            self._op(op, self.main)
        self.spaces = self.dot.wanted(loop.ops) if self.dot else {}
        self._loop(loop)
        start = self.places.start
        self.places.start = self.body  # from here on, lines stand where they are needed
        walk = self._walk()
        self._epilogue([op for op in self.kernel.block.ops if op not in before and op not in loop.ops])
        tile = [f"    {line}" for line in (*start, *self.body)]
        lines = [*self._widened(), f"for pid in {walk}:", *tile]
        descriptors = {name: b.text(self.buffers[b.buffer], self.places.size) for b, name in self.descriptors.items()}
        return module_text(
            self.kernel, self.schedule, whole, self.function, self.buffers, self.places, lines, descriptors
        )

    def _walk(self) -> str:
        """Tiles of one program. Flattened, the copies for the next tile start while this one is finished."""
        hints = "".join(f", {k}=True" for k in ("flatten", "warp_specialize") if self.switches.get(k))
        first = "tl.program_id(0)" + (".to(tl.int64)" if self.options.wide else "")
        return f"tl.range({first}, {self.places.size(self.layout.programs)}, tl.num_programs(0){hints})"

    def _program(self) -> str:
        return "pid"

    _start = Emitter._note_start

    # --- the loop ---

    def _loop(self, step: Pass) -> None:
        dim = self.layout.reduced
        assert dim is not None
        lines: list[str] = []
        first = self.places.starts[dim.axes] = self.namer.fresh(f"{dim.axes[0]}0")
        self.places.enter(lines, dim)
        for op in step.ops:
            for space in self.spaces.get(op, [self.main]):
                self._op(op, space)
        self.places.leave()
        walk = f"range(0, {self.places.size(dim.size)}, {dim.block})"
        self.body += [f"for {first} in {walk}:", *("    " + line for line in lines)]

    # --- after it ---

    def _epilogue(self, ops: list[Operation]) -> None:
        whole, columns = self.main, self.main.dims[1]
        if self.parts == 1:
            for op in ops:
                self._op(op, whole)
            return
        values = {v: val for (v, space), val in self.values.items() if space is whole}
        halves = {v: self._split(val.text) for v, val in values.items() if columns in val.dims}
        start, part = self.places.starts[columns.axes], self.part.dims[1]
        self.places.layout = self.layout = replace(self.layout, parallel=self._parallel(part))
        self.main = self.part
        for number in range(self.parts):
            self.places.forget(columns)
            self.places.starts[columns.axes] = f"{start} + {number * part.block}" if number else start
            self.values = {(v, self.main): val for v, val in values.items() if v not in halves}
            dims = frozenset(self.main.dims)
            self.values |= {(v, self.main): Val(pieces[number], dims) for v, pieces in halves.items()}
            for op in ops:
                self._op(op, self.main)

    def _split(self, text: str) -> list[str]:
        """The columns of an accumulator in equal parts, from left to right."""
        rows, columns = self.main.dims
        pieces = [text]
        while len(pieces) < self.parts:
            width = columns.block // len(pieces)
            halves: list[str] = []
            for piece in pieces:
                left, right = self.namer.fresh("part"), self.namer.fresh("part")
                shaped = f"tl.reshape({piece}, [{rows.block}, 2, {width // 2}])"
                self._line(f"{left}, {right} = tl.split(tl.permute({shaped}, [0, 2, 1]))")
                halves += [left, right]
            pieces = halves
        return pieces

    # --- bulk copies ---

    def _load(self, op: LoadOp, space: Space) -> None:
        bulk = self.bulks.get(op)
        if bulk is None:
            return super()._load(op, space)
        text = f"{self.descriptors[bulk]}.load([{self._corner(bulk, space)}])"
        if len(bulk.dims) > 2:
            text = f"tl.reshape({text}, [{bulk.sides[0].block}, {bulk.sides[1].block}])"
        if bulk.sides[0].axes != space.dims[0].axes:
            text = f"tl.trans({text})"
        self._bind(op, space, text, frozenset(space.dims))
        return None

    def _store(self, op: StoreOp, space: Space) -> None:
        bulk = self.bulks.get(op)
        if bulk is None:
            return super()._store(op, space)
        value = self._value(op.value, space)
        text = self._typed(op.value, space)
        if value.dims != frozenset(space.dims):
            text = f"tl.broadcast_to({text}, {space.shape(frozenset(space.dims))})"
        if bulk.sides[0].axes != space.dims[0].axes:
            text = f"tl.trans({text})"
        if len(bulk.dims) > 2:
            text = f"tl.reshape({text}, [{', '.join(map(str, bulk.block))}])"
        self._line(f"{self.descriptors[bulk]}.store([{self._corner(bulk, space)}], {text})")
        return None

    def _corner(self, bulk: Bulk, space: Space) -> str:
        corner = []
        for dim, run in zip(bulk.dims, bulk.runs, strict=True):
            at = self.places.starts[dim.axes] if dim.tensor else self.places.run(dim, run, space)
            corner.append(f"tl.cast({at}, tl.int32)" if self.options.wide else at)
        return ", ".join(corner)


def _needed(kernel: KernelOp, loop: Pass) -> list[Operation]:
    """What the loop needs and does not compute itself."""
    wanted: set[Operation] = set()
    for op in reversed(list(kernel.block.ops)):
        if op in loop.ops or op in wanted:
            wanted |= {v.owner for v in op.operands if isinstance(v.owner, Operation)}
    return [op for op in kernel.block.ops if op in wanted and op not in loop.ops]


def descriptor_types(kernel: KernelOp, schedule: Schedule) -> list[str]:
    """The descriptors as Triton's signatures write them, in the order of the kernel's arguments."""
    distinct = dict.fromkeys(bulks(kernel, schedule).values())
    return [f"tensordesc<{signature_name(element_of(b.buffer))}{list(b.block)}>" for b in distinct]
