"""A tile kernel to LLVM: `void kernel(ptr args, i64 begin, i64 end)` runs a range of tasks.

A task is one point of the parallel axes other than the vector axis and a sequential one, times one block of the
vector axis if that is parallel. Within a task the vector axis goes by chunks of `lanes` (many registers: this is the
unrolling), then by chunks of one register, the last of them masked. `args` holds the buffers' addresses, then the
symbols' values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect.index import Index
from tessera.tile.dialect.ops import ContractOp, ReduceExpOp, ReduceOp, ScanOp, StoreOp
from tessera.tile.dialect.types import element_of
from tessera.tile.schedules.schedule import after_sums
from tessera.tile.targets.cpu.body import Body
from tessera.tile.targets.cpu.choice import Choice
from tessera.tile.targets.cpu.code import SIZES, V
from tessera.tile.targets.cpu.elements import F32, element
from tessera.tile.targets.cpu.host import Host
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.tile.targets.cpu.layout import Layout
from tessera.tile.targets.cpu.memory import Chunk
from tessera.tile.targets.cpu.online import pair
from tessera.tile.targets.cpu.product import Blocks, Product, room_for
from tessera.tile.targets.cpu.reduce import Carried, fold, kind
from tessera.tile.targets.cpu.stages import Stage, closure, keep_between, stages
from tessera.tile.targets.cpu.transpose import read_tile, turned
from tessera.util.errors import OptionError

CASCADE = 128  # steps of a loop after which a sum of floats is moved to the next level of accumulators
STACK_SCRATCH = 16 * 1024  # bytes that may stand on the stack: threads have small ones
ROW_SCRATCH = 1 << 22  # bytes kept of one row: beyond all caches, computing again costs no more


class Lowering:
    def __init__(self, seen: Layout, choice: Choice, host: Host) -> None:
        self.seen, self.choice = seen, choice
        self.b = Code(host)
        self.body = Body(self.b, seen)
        self.names, self.memory = self.body.names, self.body.memory
        self.sizes: dict[str, V] = {}
        self.scratch: dict[SSAValue, V] = {}
        self.heap: list[V] = []
        self.later: list[StoreOp] | None = None  # stores that wait for the end of the vector loop
        self.carrying = False  # inside a loop along the reduced axis
        self.first_block: V | None = None

    # --- the function ---

    def function(self) -> str:
        self._arguments()
        if self.choice.product is not None:
            with self._tasks_of_product(self.choice.product) as emitter:
                self._vector_loop(lambda: self._block(emitter))
            return self._finished()
        before, inside = stages(self.seen, self.choice.vector)
        if self._may_keep():
            keep_between(inside)
            keep_between(before)
        self._make_scratch(before, wide=False)
        self._make_scratch(inside, wide=self._parallel_vector())
        for op in self._sums():
            self.scratch[op.result] = self._scratch(op.result, wide=False)
        with self._tasks():
            if self.seen.sequential is not None:
                self._row_loop(self.seen.sequential, inside)
            elif self._parallel_vector():
                self._row(before, inside)
            else:
                self._stages(inside)
        return self._finished()

    def _finished(self) -> str:
        b = self.b
        for p in self.heap:
            b.emit(f"call void @free({p})")
        b.emit("ret void")
        lines = ["define internal void @kernel(ptr noundef %args, i64 %begin, i64 %end) #0 {", "entry:"]
        return "\n".join([*lines, *b.slots, *b.lines, "}"])

    def _row(self, before: list[Stage], inside: list[Stage]) -> None:
        """One task whose lanes lie along a parallel axis."""
        if self.choice.tile is not None:
            return self._vector_loop(lambda: self._tile([*before, *inside]))
        self.later = []
        self._stages(before)
        later, self.later = self.later, None
        self._vector_loop(lambda: self._stages(inside))
        for op in later:
            self._store(op)

    def _tile(self, listed: list[Stage]) -> None:
        """A square of the vector axis and the tile axis: turned loads first, then the body, row by row."""
        b, axis, lanes = self.b, self.choice.tile or "", self.body.chunk.lanes
        first, size = self.names[axis], self.sizes[axis]
        count = b.call("smin", b.bin("sub", size, first), b.const("i64", lanes))
        known = self.seen.sizes[axis].constant
        columns = None if known is not None and known % lanes == 0 else self._mask(first, size, lanes)
        for op in turned(self.seen, self.choice.vector or "", axis, lanes):
            e = element(element_of(op.buffer))
            slot = self.body.turned.setdefault(op, b.slot(e.memory, 0, "square", lanes * lanes))
            base = self.body.buffers[op.buffer]
            rows = read_tile(b, self.memory, base, e, self.seen.at[op], self.body.chunk, axis, columns)
            for k, row in enumerate(rows):
                b.store(row, b.address(slot, e.memory, b.const("i64", k * lanes)))
        with b.loop(b.const("i64", 0), count, 1, f"{axis}.row") as row:
            self.body.row = b.bin("mul", row, b.const("i64", lanes))
            with self._at(axis, b.bin("add", first, row), self.body.chunk):
                self._stages(listed)
        self.names[axis] = first

    @contextmanager
    def _tasks_of_product(self, product: Product) -> Iterator[Blocks]:
        """Tasks that are blocks of rows and columns; neighbours share the rows of x, turned over once."""
        b, none = self.b, self.b.const("i64", -1)
        room = self._memory(Index.of(room_for(product)), "float")
        emitter = Blocks(b, self.memory, self.body.buffers, self.seen, product, room)
        ready = b.slot("i64", 0, "ready")
        b.store(none, ready)
        with self._tasks():
            first = self.names[product.rows]
            with b.when(b.compare("ne", b.load("i64", 0, ready), first), "pack"):
                emitter.pack()
                b.store(first, ready)
            yield emitter

    def _block(self, emitter: Blocks) -> None:
        """A block of a product, then the rest of the kernel, row by row."""
        b, product = self.b, emitter.p
        emitter.block()
        first, rest = self.names[product.rows], [Stage(False, product.rest(self.seen))]
        left = b.bin("sub", self.sizes[product.rows], first)
        count = b.call("smin", left, b.const("i64", product.block))
        with b.loop(b.const("i64", 0), count, 1, "row") as row, self._at(product.rows, first, self.body.chunk):
            self.names[product.rows] = b.bin("add", first, row)
            self.body.values[product.op.result] = emitter.row(row)
            self._stages(rest)
        self.names[product.rows] = first

    def _parallel_vector(self) -> bool:
        return self.choice.vector is not None and self.choice.vector != self.seen.reduced

    def _arguments(self) -> None:
        b, kernel = self.b, self.seen.kernel
        args = V("%args", "ptr")
        for k, buffer in enumerate(kernel.buffers):
            self.body.buffers[buffer] = b.load("ptr", 0, b.address(args, "i64", b.const("i64", k)), hint="buffer")
        for k, symbol in enumerate(kernel.symbol_names, len(kernel.buffers)):
            self.names[symbol.data] = b.load("i64", 0, b.address(args, "i64", b.const("i64", k)), hint="size")
        for axis, size in self.seen.sizes.items():
            self.sizes[axis] = self.memory.scalar(size)

    @contextmanager
    def _tasks(self) -> Iterator[None]:
        """The loop over tasks: a number whose digits are the axes' positions, counted up by hand."""
        b, choice = self.b, self.choice
        digits = [(a, self.sizes[a]) for a in self.seen.parallel if a not in (choice.vector, self.seen.sequential)]
        if choice.tile is not None:
            digits = [(a, blocks(b, n, choice.native) if a == choice.tile else n) for a, n in digits]
        if self._parallel_vector():
            digits.append(("", blocks(b, self.sizes[choice.vector or ""], choice.block)))
        left, slots = V("%begin", "i64"), []
        for axis, size in reversed(digits):
            slot = b.slot("i64", 0, f"at.{axis}")
            slots.append(slot)
            b.store(b.bin("urem", left, self._one_if_empty(size)), slot)
            left = b.bin("udiv", left, self._one_if_empty(size))
        with b.loop(V("%begin", "i64"), V("%end", "i64"), 1, "task"):
            for (axis, _), slot in zip(reversed(digits), slots, strict=True):
                self.names[axis] = b.load("i64", 0, slot, hint=axis or "block")
                if axis == choice.tile:
                    self.names[axis] = b.bin("mul", self.names[axis], b.const("i64", choice.native))
            if self._parallel_vector():
                block = self.names.pop("")
                self.first_block = b.compare("eq", block, b.const("i64", 0))
                self.names[choice.vector or ""] = b.bin("mul", block, b.const("i64", choice.block))
            yield
            carry: V = b.const("i64", 1)
            for (_, size), slot in zip(reversed(digits), slots, strict=True):
                up = b.bin("add", b.load("i64", 0, slot), carry)
                over = b.compare("eq", up, size)
                b.store(b.select(over, b.const("i64", 0), up), slot)
                carry = b.convert("zext", over, "i64")

    def _one_if_empty(self, size: V) -> V:
        return size if size.literal and size.name != "0" else self.b.call("umax", size, self.b.const("i64", 1))

    # --- the sequential axis ---

    def _sums(self) -> list[ReduceOp]:
        """Sums along the sequential axis; each has a row of scratch memory."""
        return [] if self.seen.sequential is None else self.seen.kernel.sums_along(self.seen.sequential)

    def _row_loop(self, rows: str, inside: list[Stage]) -> None:
        """Row after row, then what is to be done with the sums over them."""
        b, sums = self.b, self._sums()
        for op in sums:
            e, row = element(element_of(op.result)), self.scratch[op.result]
            count = self.memory.scalar(self._row_length(wide=False) * SIZES[e.memory])
            b.declare("memset", "ptr", ["ptr", "i32", "i64"])
            b.emit(f"call ptr @memset({row}, i32 0, {count})")
        with b.loop(b.const("i64", 0), self.sizes[rows], 1, rows) as at, self._at(rows, at, self.body.chunk):
            self._stages(inside)
        later = after_sums(self.seen.kernel)
        ready = [op.result for op in sums]
        ops = closure([op for op in self.seen.kernel.block.ops if op not in sums], set(later), set(ready))
        self._stages([Stage(True, ops, take=ready)])

    def _add_to_row(self, op: ReduceOp, where: V) -> None:
        """One more row of a sum along the sequential axis. Lanes past the end add to memory past the row's end."""
        b, e = self.b, element(element_of(op.arg))
        address = b.address(self.scratch[op.result], e.memory, where)
        x = b.splat(self.body.values[op.arg], self.body.chunk.lanes)
        total = b.load(e.memory, self.body.chunk.lanes, address)
        b.store(b.bin("fadd" if e.is_float else "add", total, x), address)

    # --- the vector axis ---

    def _vector_loop(self, body: Callable[[], None]) -> None:
        """Chunks of a parallel vector axis."""
        b, axis = self.b, self.choice.vector or ""
        start = self.names[axis]
        stop = b.call("smin", b.bin("add", start, b.const("i64", self.choice.block)), self.sizes[axis])
        size, lanes, native = self.seen.sizes[axis].constant, self.choice.lanes, self.choice.native
        length = b.bin("sub", stop, start)
        full = b.bin("add", start, b.bin("and", length, b.const("i64", -lanes)))
        if size is None or size >= lanes:
            with b.loop(start, full, lanes, axis) as at, self._at(axis, at, Chunk(axis, lanes)):
                body()
        if size is None or size % lanes:
            with b.loop(full, stop, native, f"{axis}.rest") as at:
                mask = None if size is not None and size % native == 0 else self._mask(at, stop, native)
                with self._at(axis, at, Chunk(axis, native, mask)):
                    body()
        self.names[axis] = start

    def _mask(self, at: V, stop: V, lanes: int) -> V:
        b = self.b
        left = b.call("smin", b.bin("sub", stop, at), b.const("i64", lanes))
        short = b.convert("trunc", left, "i32")
        return b.compare("ult", b.lane_numbers("i32", lanes), short)

    @contextmanager
    def _at(self, axis: str, position: V, chunk: Chunk) -> Iterator[None]:
        """A body at a position along an axis; values made in it are forgotten after it."""
        before, values = self.body.chunk, dict(self.body.values)
        self.names[axis], self.body.chunk = position, chunk
        yield
        self.body.chunk, self.body.values = before, values

    # --- stages ---

    def _stages(self, listed: list[Stage]) -> None:
        for stage in listed:
            self.carrying = stage.loop
            if not stage.loop:
                for op in stage.ops:
                    self._op(op)
            elif self.body.chunk.lanes or self.choice.vector is None:
                self._step_by_step(stage)
            elif self.choice.piece:
                self._across_pieces(stage)
            else:
                self._across_lanes(stage)

    def _step_by_step(self, stage: Stage) -> None:
        """A loop along the reduced axis, one position after another; lanes, if any, lie along another axis."""
        b, axis = self.b, self.seen.reduced or ""
        size = self.seen.sizes[axis].constant
        carried = self._carry(stage, self.body.chunk.lanes, _levels(size))
        self.body.carried |= self._start_scans(stage, self.body.chunk.lanes)

        def body(at: V) -> None:
            with self._at(axis, at, self.body.chunk):
                self._body(stage, b.bin("mul", at, b.const("i64", self.body.chunk.lanes or 1)))

        self._walk(b.const("i64", 0), self.sizes[axis], 1, axis, body, carried)
        for op, c in carried.items():
            self.body.finish(op, c.kind, c.parts())

    def _across_lanes(self, stage: Stage) -> None:
        """A loop along the reduced axis whose lanes are neighbours on it; partial results are joined at the end."""
        b, axis = self.b, self.seen.reduced or ""
        native = self.choice.native
        scans = self._start_scans(stage, 0)
        lanes = native if scans else self.choice.lanes  # a scan's lanes wait for each other
        size, stop = self.seen.sizes[axis].constant, self.sizes[axis]
        full = b.bin("and", stop, b.const("i64", -lanes))
        results: dict[Operation, list] = {}

        def part(width: int, mask: bool, start: V, end: V, levels: int) -> None:
            carried = self._carry(stage, width, levels)
            self.body.carried |= scans

            def body(at: V) -> None:
                keep = self._mask(at, stop, width) if mask else None
                with self._at(axis, at, Chunk(axis, width, keep)):
                    self._body(stage, at)

            self._walk(start, end, width, axis, body, carried)
            for op, c in carried.items():
                results.setdefault(op, []).append(c)

        if size is None or size >= lanes:
            part(lanes, False, b.const("i64", 0), full, _levels(size and size // lanes))
        if size is None or size % lanes:
            part(native, size is None or size % native != 0, full, stop, 0)
        for op, parts in results.items():
            self._join(op, parts)

    def _across_pieces(self, stage: Stage) -> None:
        """The same, piece by piece: no chunk crosses the end of one, so that every access is a run of neighbours."""
        b, axis, piece = self.b, self.seen.reduced or "", self.choice.piece
        full = piece // self.choice.lanes * self.choice.lanes
        ranges = [(self.choice.lanes, 0, full), (self.choice.native, full, piece)]  # lanes, first, end
        steps = max(full // self.choice.lanes, 1)
        levels = _levels((self.seen.sizes[axis].constant or 0) // piece * steps)
        parts = [(r, self._carry(stage, r[0], levels)) for r in ranges if r[1] < r[2]]

        def body(at: V) -> None:
            for (lanes, first, end), carried in parts:
                self.body.carried = carried
                stop = b.bin("add", at, b.const("i64", end))
                with b.loop(b.bin("add", at, b.const("i64", first)), stop, lanes, axis) as here:
                    keep = self._mask(here, stop, lanes) if (end - first) % lanes else None
                    with self._at(axis, here, Chunk(axis, lanes, keep, piece)):
                        self._body(stage, here)

        every = {(k, op): c for k, (_, carried) in enumerate(parts) for op, c in carried.items()}
        run = max(CASCADE // steps, 1)
        self._walk(b.const("i64", 0), self.sizes[axis], piece, f"{axis}.piece", body, every, run)
        for op in parts[0][1]:
            self._join(op, [carried[op] for _, carried in parts])

    def _join(self, op: Operation, parts: list[Carried]) -> None:
        """The result of a reduction whose parts were carried apart, in the lanes of chunks of different lengths."""
        b, how = self.b, parts[0].kind
        total, *others = (fold(b, how, c.parts(), self.choice.native) for c in parts)
        for other in others:
            total = how.merge(b, total, other)
        self.body.finish(op, how, fold(b, how, total, 0))

    def _walk(
        self, start: V, stop: V, step: int, hint: str, body: Callable[[V], None], carried: dict, run: int = CASCADE
    ) -> None:
        """A loop, inside loops over blocks of it where sums have several levels: of `run` steps the smallest."""
        levels = max((len(c.levels) for c in carried.values()), default=1)
        self._level(start, stop, step, hint, body, carried, levels, run)

    def _level(
        self, start: V, stop: V, step: int, hint: str, body: Callable[[V], None], carried: dict, levels: int, run: int
    ) -> None:
        b = self.b
        if levels == 1:
            with b.loop(start, stop, step, hint) as at:
                body(at)
            return
        block = step * run * CASCADE ** (levels - 2)
        with b.loop(start, stop, block, f"{hint}.block") as first:
            for c in carried.values():
                c.begin_block(levels - 2)
            end = b.call("smin", b.bin("add", first, b.const("i64", block)), stop)
            self._level(first, end, step, hint, body, carried, levels - 1, run)
            for c in carried.values():
                c.end_block(levels - 2)

    def _carry(self, stage: Stage, lanes: int, levels: int) -> dict[Operation, Carried]:
        """Start the reductions of a loop."""
        self.body.carried = {}
        for op in stage.ops:
            if isinstance(op, ReduceOp) and op.axis.data != self.seen.sequential:
                how = kind(op.kind.data, element(element_of(op.arg)), self.b.host)
                self.body.carried[op] = Carried(self.b, how, lanes, levels)
            elif isinstance(op, ReduceExpOp):
                how = pair(op.fn.data, op.infinite.data, element(element_of(op.arg)))
                self.body.carried[op] = Carried(self.b, how, lanes, levels)
            elif isinstance(op, ContractOp):
                self.body.carried[op] = Carried(self.b, kind("sum", F32, self.b.host), lanes, levels)
        return dict(self.body.carried)

    def _start_scans(self, stage: Stage, lanes: int) -> dict[Operation, Carried]:
        scans = [op for op in stage.ops if isinstance(op, ScanOp)]
        for op in scans:
            if op.axis.data != self.seen.reduced:
                raise OptionError(f"expected a scan along the reduced axis {self.seen.reduced!r}, got {op.axis.data!r}")
        kinds = {op: kind(op.kind.data, element(element_of(op.arg)), self.b.host) for op in scans}
        return {op: Carried(self.b, how, lanes, 0) for op, how in kinds.items()}

    def _body(self, stage: Stage, where: V) -> None:
        b = self.b
        for v in stage.take:
            e = element(element_of(v))
            address = b.address(self.scratch[v], e.memory, where)
            x = b.load(e.memory, self.body.chunk.lanes, address)
            self.body.values[v] = b.compare("ne", x, b.like(x, 0)) if e.name == "i1" else x
        for op in stage.ops:
            if isinstance(op, ReduceOp) and op.axis.data == self.seen.sequential:
                self._add_to_row(op, where)
                continue
            self._op(op)
            if op.results and op.results[0] in stage.keep:
                x, e = self.body.values[op.results[0]], element(element_of(op.results[0]))
                x = b.splat(x, self.body.chunk.lanes)
                x = b.convert("zext", x, "i8") if e.name == "i1" else x
                b.store(x, b.address(self.scratch[op.results[0]], e.memory, where))

    def _op(self, op: Operation) -> None:
        if not isinstance(op, StoreOp):
            self.body.run(op)
        elif self.later is not None and not self.carrying:
            self.later.append(op)
        else:
            self._store(op)

    def _store(self, op: StoreOp) -> None:
        self.body.store(op, self._once(op) if op.mode.data == "add" else None)

    def _once(self, op: StoreOp) -> V | None:
        """Whether this point adds: along axes that a store does not vary over, only the first does."""
        missing = [a for a in self.seen.parallel if a not in self.seen.axes_of_op(op)]
        conditions = []
        for axis in missing:
            if axis == self.choice.vector:
                conditions.append(self.first_block)
            else:
                conditions.append(self.b.compare("eq", self.names[axis], self.b.const("i64", 0)))
        result = None
        for c in conditions:
            result = c if result is None else self.b.bin("and", result, c)  # type: ignore[arg-type]
        return result

    # --- scratch ---

    def _may_keep(self) -> bool:
        if self.seen.reduced is None:
            return False
        size = self.seen.sizes[self.seen.reduced].constant
        if self._parallel_vector():
            every_lane = self.choice.lanes * 8  # bytes of an element of all rows
            return size is not None and size * every_lane <= self.b.host.cached
        return size is None or size * 8 <= ROW_SCRATCH

    def _make_scratch(self, listed: list[Stage], wide: bool) -> None:
        for v in [v for stage in listed for v in stage.ops and sorted(stage.keep, key=_order(stage))]:
            self.scratch[v] = self._scratch(v, wide)

    def _row_length(self, wide: bool) -> Index:
        """Elements that are kept of a row: all of them, once for every lane, or with room for the last lanes."""
        size, lanes = self.seen.sizes[self.seen.reduced or ""], max(self.choice.lanes, 1)
        return size * lanes if wide else size + lanes

    def _scratch(self, v: SSAValue, wide: bool) -> V:
        return self._memory(self._row_length(wide), element(element_of(v)).memory)

    def _memory(self, count: Index, elem: str) -> V:
        """Room for so many elements, on the stack if they are few."""
        b = self.b
        if count.constant is not None and count.constant * SIZES[elem] <= STACK_SCRATCH:
            return b.slot(elem, 0, "row", count.constant)
        b.declare("malloc", "ptr", ["i64"])
        b.declare("free", "void", ["ptr"])
        total = self.memory.scalar(count * SIZES[elem])
        self.heap.append(b.value(f"call ptr @malloc({total})", "ptr", 0, "row", pure=False))
        return self.heap[-1]


def _levels(steps: int | None) -> int:
    """How many levels above the first a sum over so many steps should have."""
    if steps is None:
        return 2
    return 0 if steps <= 2 * CASCADE else 1 if steps <= 2 * CASCADE**2 else 2


def _order(stage: Stage) -> Callable[[SSAValue], int]:
    return lambda v: next(k for k, op in enumerate(stage.ops) if v in op.results)


def blocks(b: Code, size: V, block: int) -> V:
    """How many blocks cover a size."""
    return b.bin("udiv", b.bin("add", size, b.const("i64", block - 1)), b.const("i64", block))
