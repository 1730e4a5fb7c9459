"""Writes a kernel under a schedule as a Triton module that a person can read and run on its own.

Out comes the text of a Python module: a docstring that says what the kernel does and how it is scheduled, the helpers
it needs, one `@triton.jit` function with a line per tile operation, and `grid` and `launch`. The reduced axis lies in
one block, or is read in loops (see `schedule.plan`). Masks stand only where a block can reach past the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import Float32Type, IntegerType
from xdsl.ir import Attribute, Operation, SSAValue

from tessera.tile.dialect.ops import (
    PARALLEL,
    ApplyOp,
    CastOp,
    ConstantOp,
    ContractOp,
    IotaOp,
    KernelOp,
    LoadOp,
    RandomOp,
    ReduceExpOp,
    ReduceOp,
    ScanOp,
    StoreOp,
)
from tessera.tile.dialect.types import axes_of, element_of
from tessera.tile.rewrites.copying import op_axes, zero_outside
from tessera.tile.rewrites.offline import without_reduce_exp
from tessera.tile.rewrites.online import with_reduce_exp
from tessera.tile.schedules.schedule import Pass, Schedule, after_sums, plan, reduced_axis
from tessera.tile.targets.triton.functions import all_narrow, template, type_name
from tessera.tile.targets.triton.hazard import check_loop
from tessera.tile.targets.triton.layout import Dim, layout, needs_wide
from tessera.tile.targets.triton.module import module_text
from tessera.tile.targets.triton.names import Namer
from tessera.tile.targets.triton.online import Running
from tessera.tile.targets.triton.product import DotSpaces, dot_spaces
from tessera.tile.targets.triton.programs import Programs
from tessera.tile.targets.triton.reduction import accumulate, identity, reduce_text, scan_lines, start_text
from tessera.tile.targets.triton.spaces import Dims, Places, Space, Val
from tessera.tile.targets.triton.threads import lanes_of, runs_down
from tessera.tile.targets.triton.unroll import LOADS_FIRST, blocks_of_a_step, loads_first
from tessera.tile.targets.triton.values import PLAIN_INTEGER, cast, is_truth, number, zero


@dataclass(frozen=True)
class Options:
    wide: bool = False  # offsets need 64 bits
    tf32: bool = False  # f32 matrix products may round their inputs to tf32


DEFAULT = Options()


def emit(kernel: KernelOp, schedule: Schedule, options: Options = DEFAULT) -> str:
    """The module's text."""
    check_loop(kernel, schedule)
    products = any(isinstance(op, ContractOp) for op in kernel.block.ops)
    kernel = with_reduce_exp(kernel) if schedule.loop and not products else without_reduce_exp(kernel)
    if not options.wide and needs_wide(kernel, {}):
        options = replace(options, wide=True)
    return Emitter(kernel, schedule, options).module()


class Emitter:
    def __init__(self, kernel: KernelOp, schedule: Schedule, options: Options) -> None:
        self.kernel, self.schedule, self.options = kernel, schedule, options
        self.layout = layout(kernel, schedule)
        self.namer = Namer()
        self.function = self.namer.fresh(kernel.sym_name.data)
        self.buffers = {b: self.namer.fresh(b.name_hint or f"b{i}") for i, b in enumerate(kernel.buffers)}
        self.places = Places(kernel, self.layout, options.wide, self.namer)
        self.dot: DotSpaces | None = dot_spaces(kernel, self.layout)
        order = {a: i for i, a in enumerate(kernel.axis_names())}
        dims = sorted((d for d in self.layout.dims if d.tensor), key=lambda d: order[d.axes[0]])
        self.main = self.dot.main if self.dot else Space(tuple(dims))
        self.fast = all_narrow(kernel)
        self.values: dict[tuple[SSAValue, Space], Val] = {}
        self.body: list[str] = []  # what stands after the start
        self.after: list[str] = []  # what the loop that is being written leaves to be done when it ends
        self.spaces: dict[Operation, list[Space]] = {}
        self.loops_left: dict[LoadOp, int] = {}  # of loads that later loops repeat
        self.carried: dict[Operation, tuple[str, str]] = {}  # what the loop that is being written adds its blocks to
        self.count = 0

    # --- the whole ---

    def module(self) -> str:
        self._programs()
        axis = reduced_axis(self.kernel)
        if self.layout.sequential is not None:
            self._sequential_loop(self.layout.sequential)
        elif axis is None or (not self.schedule.loop and self.dot is None):
            for op in self._ordered():
                self._op(op, self.main)
        else:
            self._passes(plan(self.kernel))
        lines = [*self._widened(), *self.places.start, *self.body]
        return module_text(self.kernel, self.schedule, self.layout, self.function, self.buffers, self.places, lines)

    def _ordered(self) -> list[Operation]:
        """Operations of a kernel without loops. Behind the barriers of a reduction a load would wait for them."""
        ops = list(self.kernel.block.ops)
        first, rest = loads_first(ops) if dict(self.schedule.extra).get(LOADS_FIRST) else ([], ops)
        return [*first, *rest]

    def _widened(self) -> list[str]:
        names = self.places.symbols.values() if self.options.wide else ()
        return [f"{s} = tl.cast({s}, tl.int64)" for s in names]

    def _program(self) -> str:
        return "tl.program_id(0)" + (".to(tl.int64)" if self.options.wide else "")

    def _programs(self) -> None:
        """Which block of every parallel dim this program has."""
        group = self.schedule.group if self.dot else 1
        Programs(self.layout, self.places, self.namer, group).write(self._program(), self._start)

    def _start(self, dim: Dim, first: str) -> None:
        """This program's block of a dim starts there."""
        self.places.position(dim, self.main, first)

    def _note_start(self, dim: Dim, first: str) -> None:
        """A block's start under a name, for emitters that compute positions where they are needed."""
        name = self.places.starts[dim.axes] = self.namer.fresh(f"at_{''.join(dim.axes)}")
        self.places.start.append(f"{name} = {first}")

    # --- passes along the reduced axis ---

    def _passes(self, passes: list[Pass]) -> None:
        self._evictions(passes)
        for step in passes:
            self.spaces = self.dot.wanted(step.ops) if self.dot and step.axis else {}
            if step.axis is None or not self.schedule.loop:
                for op in step.ops:
                    for space in self.spaces.get(op, [self.main]):
                        if not op.results or (op.results[0], space) not in self.values:
                            self._op(op, space)
            else:
                self._loop(step)

    def _loop(self, step: Pass) -> None:
        dim = self.layout.reduced
        assert dim is not None
        lines: list[str] = []
        outside = self.values
        first = self.namer.fresh(f"{dim.axes[0]}0")
        count = 1 if self.dot or self.loops_left else blocks_of_a_step(self.schedule, step.ops, dim)
        places: list[dict[tuple[str, str], str]] = [{} for _ in range(count)]
        values = [dict(outside) for _ in range(count)]
        self.after, self.carried = [], {}
        for ops in loads_first(step.ops) if count > 1 else (step.ops,):
            for k in range(count):
                self.places.enter(lines, dim, places[k])
                self.values = values[k]
                self._block(ops, dim, f"{first} + {k * dim.block}" if k else first)
        for names in places:
            self.places.enter(lines, dim, names)
            self.places.leave()
        self.namer.release([first])
        self._write_loop(first, dim, dim.block * count, 1 if self.dot else self.schedule.stages, lines)
        # What varies along the axis is gone when the loop ends; its reductions stay.
        every = [item for own in values for item in own.items()]
        self.values = {k: v for k, v in every if k in outside or dim.axes[0] not in axes_of(k[0])}

    def _write_loop(self, first: str, dim: Dim, step: int, stages: int, lines: list[str]) -> None:
        steps = f"0, {self.places.size(dim.size)}, {step}"
        steps = f"range({steps})" if stages <= 2 else f"tl.range({steps}, num_stages={stages})"
        self.body += [f"for {first} in {steps}:", *("    " + line for line in lines), *self.after]

    def _block(self, ops: Sequence[Operation], dim: Dim, first: str) -> None:
        """Operations on the block of a loop's dim that starts there."""
        for space in {s: None for op in ops for s in self.spaces.get(op, [self.main])}:
            if dim in space.dims:
                self.places.position(dim, space, first)
        for op in ops:
            for space in self.spaces.get(op, [self.main]):
                self._op(op, space)

    def _sequential_loop(self, dim: Dim) -> None:
        """All of the body in a loop along the sequential axis, but for what does not vary there and what waits."""
        later = after_sums(self.kernel)
        rest = [op for op in self.kernel.block.ops if op not in later]
        axis = dim.axes[0]
        moves = {op for op in rest if axis in op_axes(op)}
        for op in rest:
            if op not in moves:
                self._op(op, self.main)
        lines: list[str] = []
        first = self.namer.fresh(f"{axis}0")
        self.places.enter(lines, dim)
        if dim.tensor:
            self.places.position(dim, self.main, first)
        else:
            self.places.set_position(dim, f"tl.cast({first}, tl.int64)" if self.options.wide else first)
        self.after = []
        for op in rest:
            if op in moves:
                self._op(op, self.main)
        self.places.leave()
        self._write_loop(first, dim, dim.block, self.schedule.stages, lines)
        for op in later:
            self._op(op, self.main)

    def _sequential_sum(self, op: ReduceOp, dim: Dim) -> None:
        """A block of sums, carried from step to step; rows of one step are joined when the loop has ended."""
        arg, element = self._value(op.arg, self.main), element_of(op.arg)
        text = self._typed(op.arg, self.main)
        dims = arg.dims | ({dim} if dim.tensor else set())
        if dim.masked:
            text = f"tl.where({self.places.inside(dim, self.main)}, {text}, {identity('sum', element)})"
        name, self.count = self.namer.fresh(f"sum_{self.count}"), self.count + 1
        self.body += start_text("sum", element, name, "", self.main.shape(dims), self.options.wide)
        self._line(accumulate("sum", element, name, "", text, ""))
        total = name
        if dim.tensor:
            axis, total = self.main.dims.index(dim), self.namer.fresh(f"{name}_all")
            self.after.append(f"{total} = {reduce_text('sum', element, name, '', axis, len(self.main.dims))}")
        self.values[op.result, self.main] = Val(total, dims - {dim})

    def _evictions(self, passes: list[Pass]) -> None:
        """A row that a later loop reads again should stay in the cache; after the last loop it may go."""
        if self.schedule.loop and not self.dot:
            reads = Counter(op for p in passes if p.axis is not None for op in p.ops if isinstance(op, LoadOp))
            self.loops_left = {op: count for op, count in reads.items() if count > 1}

    # --- one operation ---

    def _line(self, text: str) -> None:
        (self.body if self.places.inner is None else self.places.inner).append(text)

    def _bind(self, op: Operation, space: Space, text: str, dims: Dims) -> None:
        result = op.results[0]
        if result.name_hint:
            wanted = result.name_hint
        else:
            wanted, self.count = f"v{self.count}", self.count + 1
        name = self.namer.fresh(wanted + (space.suffix if len(self.spaces.get(op, ())) > 1 else ""))
        self._line(f"{name} = {text}")
        self.values[result, space] = Val(name, dims)

    def _value(self, v: SSAValue, space: Space) -> Val:
        if (v, space) in self.values:
            return self.values[v, space]
        return self.values[v, self.main]  # not along the reduced axis, so of the same form in every space

    def _typed(self, v: SSAValue, space: Space) -> str:
        """A value as something with a type of its own, even if it is a number."""
        value = self._value(v, space)
        return f"tl.full((), {value.text}, {type_name(element_of(v))})" if value.literal else value.text

    def _op(self, op: Operation, space: Space) -> None:
        if self.dot and op in self.dot.unused:
            return
        match op:
            case ConstantOp():
                self.values[op.result, self.main] = Val(number(op.value), literal=True)
            case LoadOp():
                self._load(op, space)
            case StoreOp():
                self._store(op, space)
            case IotaOp():
                text, dims = self._offset(op.at.expr, op.indices, space)
                self._bind(op, space, f"tl.cast({text}, {type_name(element_of(op.result))})", dims)
            case ApplyOp():
                self._apply(op, space)
            case CastOp():
                arg = self._value(op.arg, space)
                text = cast(self._typed(op.arg, space), element_of(op.arg), element_of(op.result))
                self._bind(op, space, text, arg.dims)
            case RandomOp():
                seed, offset = self._value(op.seed, space), self._value(op.offset, space)
                text = f"_random({self._typed(op.seed, space)}, {self._typed(op.offset, space)})"
                self._bind(op, space, text, seed.dims | offset.dims)
            case ReduceOp() if self.layout.sequential is not None and op.axis.data in self.layout.sequential.axes:
                self._sequential_sum(op, self.layout.sequential)
            case ReduceOp():
                self._reduce(op, op.kind.data, self._value(op.arg, space), element_of(op.arg), space)
            case ReduceExpOp():
                self._reduce_exp(op, space)
            case ScanOp():
                self._scan(op, space)
            case ContractOp():
                self._contract(op, space)
            case _:
                raise NotImplementedError(f"the Triton target has no rule for {op.name}")

    def _apply(self, op: ApplyOp, space: Space) -> None:
        args = [self._value(a, space) for a in op.args]
        dims = frozenset().union(*(a.dims for a in args))
        operand = op.args[-1]  # of `select` the first is the condition
        texts = [self._argument(op, k, a, space) for k, a in enumerate(args)]
        if op.fn.data == "select" and not is_truth(element_of(op.args[0])):
            texts[0] = f"{texts[0]} != 0"
        self._bind(op, space, template(op.fn.data, element_of(operand), self.fast).format(*texts), dims)

    def _argument(self, op: ApplyOp, position: int, value: Val, space: Space) -> str:
        """A number stands as itself beside an f32 or a wide integer; elsewhere it would change the type."""
        if not value.literal:
            return value.text
        element = element_of(op.args[position])
        beside = any(
            not self._value(v, space).literal and element_of(v) == element
            for k, v in enumerate(op.args)
            if k != position and not (op.fn.data == "select" and k == 0)
        )
        wide = isinstance(element, IntegerType) and element.width.data >= 32 and abs(int(value.text)) < 2**31
        plain = isinstance(element, Float32Type) or (wide and op.fn.data in PLAIN_INTEGER)
        return value.text if beside and plain else self._typed(op.args[position], space)

    # --- memory ---

    def _offset(self, expr, indices: Sequence[SSAValue], space: Space) -> tuple[str, Dims]:
        values = [self._value(v, space) for v in indices]
        texts = [f"tl.cast({self._typed(v, space)}, tl.int64)" for v in indices]
        return self.places.offset(expr, [(t, v.dims) for t, v in zip(texts, values, strict=True)], space)

    def _pointer(self, buffer: SSAValue, at: str, at_dims: Dims, dims: Dims, space: Space) -> str:
        text = self.buffers[buffer] if at == "0" else f"{self.buffers[buffer]} + {at}"
        return text if at_dims == dims else f"tl.broadcast_to({text}, {space.shape(dims)})"

    def _mask(self, dims: Dims, mask: SSAValue | None, space: Space) -> list[str]:
        parts = [self.places.inside(d, space) for d in space.dims if d in dims and d.masked]
        return parts + ([self._typed(mask, space)] if mask is not None else [])

    def _load(self, op: LoadOp, space: Space) -> None:
        at, at_dims = self._offset(op.at.expr, op.indices, space)
        dims = at_dims
        for extra in (op.mask, op.other):
            dims |= self._value(extra, space).dims if extra is not None else frozenset()
        mask = self._mask(dims, op.mask, space)
        text = f"tl.load({self._pointer(op.buffer, at, at_dims, dims, space)}"
        if mask:
            other = self._typed(op.other, space) if op.other is not None else zero(element_of(op.buffer))
            text += f", mask={' & '.join(mask)}, other={other}"
        if op in self.loops_left and self.places.inner is not None:
            self.loops_left[op] -= 1
            text += f', eviction_policy="{"evict_last" if self.loops_left[op] else "evict_first"}"'
        self._bind(op, space, text + ")", dims)

    def _store(self, op: StoreOp, space: Space) -> None:
        at, at_dims = self._offset(op.at.expr, op.indices, space)
        value = self._value(op.value, space)
        dims = at_dims | value.dims
        if op.mask is not None:
            dims |= self._value(op.mask, space).dims
        guards: list[str] = []
        if op.mode.data == "add":
            element = element_of(op.buffer)
            if isinstance(element, IntegerType) and element.width.data < 32:
                raise NotImplementedError(f"no atomic addition of {element} on a GPU")
            guards, guard_dims = self._once(op, space)
            dims |= guard_dims
        mask = self._mask(dims, op.mask, space) + guards
        pointer = self._pointer(op.buffer, at, at_dims, dims, space)
        masked = f", mask={' & '.join(mask)}" if mask else ""
        call, order = ("tl.atomic_add", ', sem="relaxed"') if op.mode.data == "add" else ("tl.store", "")
        self._line(f"{call}({pointer}, {self._typed(op.value, space)}{masked}{order})")

    def _once(self, op: StoreOp, space: Space) -> tuple[list[str], Dims]:
        """An addition that does not vary along a parallel axis happens at that axis' first position alone."""
        used = set(op.at.expr.names())
        for v in (op.value, *op.indices, *([op.mask] if op.mask is not None else [])):
            used |= set(axes_of(v))
        positions = [self.places.axis(a, space) for a in self.kernel.axis_names(PARALLEL) if a not in used]
        return [f"({t} == 0)" for t, _ in positions if t != "0"], frozenset().union(*(d for _, d in positions))

    # --- along the reduced axis ---

    def _reduce(self, op: Operation, kind: str, arg: Val, element: Attribute, space: Space) -> None:
        dim = self.layout.reduced
        assert dim is not None
        dims = arg.dims | {dim}
        text = self._block_of(arg, dim, kind, element, space)
        place = self.places.position(dim, space)
        if kind.startswith("arg") and dims != {dim}:
            place = f"tl.broadcast_to({place}, {space.shape(dims)})"
        # What varies over nothing is a scalar, not a block of one element.
        alone = dims == {dim} and len(space.dims) > 1
        if self.places.moving != dim:
            if alone:
                text, place = (f"tl.reshape({t}, [{dim.block}])" for t in (text, place))
            axis, rank = (0, 1) if alone else (space.dims.index(dim), len(space.dims))
            self._bind(op, space, reduce_text(kind, element, text, place, axis, rank), dims - {dim})
            self.values[op.results[0], self.main] = self.values[op.results[0], space]
            return
        if op in self.carried:  # another block of the same step
            self._line(accumulate(kind, element, *self.carried[op], text, place))
            return
        name = self.namer.fresh(f"{kind}_{self.count}")
        where = self.namer.fresh(f"{name}_at") if kind.startswith("arg") else ""
        self.carried[op] = name, where
        self.body += start_text(kind, element, name, where, space.shape(dims), self.options.wide)
        self._line(accumulate(kind, element, name, where, text, place))
        if alone:
            name, where = (f"tl.reshape({t}, [{dim.block}])" for t in (name, where))
        lines, self.places.inner = self.places.inner, None
        body, self.body = self.body, []
        self._bind(op, space, self._carried_sum(kind, element, name, where, dims, space), dims - {dim})
        self.after += self.body
        self.places.inner, self.body = lines, body
        self.values[op.results[0], self.main] = self.values[op.results[0], space]

    def _block_of(self, arg: Val, dim: Dim, kind: str, element: Attribute, space: Space) -> str:
        """What is reduced, along the dim; past its end stands what changes nothing."""
        text = f"tl.full((), {arg.text}, {type_name(element)})" if arg.literal else arg.text
        if dim.masked:
            text = f"tl.where({self.places.inside(dim, space)}, {text}, {identity(kind, element)})"
        return text if dim in arg.dims else f"tl.broadcast_to({text}, {space.shape(arg.dims | {dim})})"

    def _carried_sum(self, kind: str, element: Attribute, name: str, where: str, dims: Dims, space: Space) -> str:
        """What a loop carried, reduced along the reduced dim."""
        dim = self.layout.reduced
        assert dim is not None
        if dims == {dim}:
            return reduce_text(kind, element, name, where, 0, 1)
        axis, rank = space.dims.index(dim), len(space.dims)
        floats = kind == "sum" and isinstance(element, Float32Type)
        if floats and axis == 1 and dims == {*space.dims} and runs_down(self.kernel, self.schedule, dim, space.dims[0]):
            name = f"_pairs({name}, {space.dims[0].block}, {dim.block // 2})"
        return reduce_text(kind, element, name, where, axis, rank)

    def _reduce_exp(self, op: ReduceExpOp, space: Space) -> None:
        """Only in a loop: elsewhere it is two reductions."""
        dim, element = self.layout.reduced, element_of(op.arg)
        assert dim is not None and self.places.inner is not None
        arg = self._value(op.arg, space)
        dims = arg.dims | {dim}
        text = self._block_of(arg, dim, "max", element, space)
        alone = dims == {dim}  # what varies over nothing is a scalar, not a block of one element
        shape = (dim.block,) if alone else tuple(d.block if d in dims else 1 for d in space.dims)
        axis = 0 if alone else space.dims.index(dim)
        if alone and len(space.dims) > 1:
            text = f"tl.reshape({text}, [{dim.block}])"
        lanes, vector = lanes_of(self.kernel, self.schedule, dim, shape)
        exp = template(op.fn.data, element, self.fast)
        fresh = [self.namer.fresh(f"{wanted}_{self.count}") for wanted in ("top", "total", "x", "high", "base")]
        running = Running(*fresh[:2], shape, axis, lanes, vector, exp)
        self.body += running.start(type_name(element))
        for line in running.step(text, fresh[2:]):
            self._line(line)
        results = [self.namer.fresh(v.name_hint or f"v{self.count + k}") for k, v in enumerate(op.results)]
        self.count += 2
        self.after += running.finish(*results, op.infinite.data)
        for v, name in zip(op.results, results, strict=True):
            self.values[v, space] = self.values[v, self.main] = Val(name, dims - {dim})

    def _scan(self, op: ScanOp, space: Space) -> None:
        dim = self.layout.reduced
        assert dim is not None and op.axis.data in dim.axes, "a scan runs along the reduced axis"
        arg, element = self._value(op.arg, space), element_of(op.arg)
        dims = arg.dims | {dim}
        text = self._typed(op.arg, space)
        if dim not in arg.dims:
            text = f"tl.broadcast_to({text}, {space.shape(dims)})"
        axis, rank = space.dims.index(dim), len(space.dims)
        carry = self.namer.fresh("carry") if self.places.moving == dim else ""
        start, here, step = scan_lines(op.kind.data, element, text, carry, axis, rank, space.shape(dims - {dim}))
        # The carry starts again in every loop along the axis.
        self.body += start
        self._bind(op, space, here, dims)
        for line in step:
            self._line(line)

    def _contract(self, op: ContractOp, space: Space) -> None:
        dim = self.layout.reduced
        assert dim is not None
        if self.dot is None:
            texts = [cast(self._typed(v, space), element_of(v), element_of(op.result)) for v in (op.lhs, op.rhs)]
            dims = self._value(op.lhs, space).dims | self._value(op.rhs, space).dims
            self._reduce(op, "sum", Val(f"{texts[0]} * {texts[1]}", dims), element_of(op.result), space)
            return
        operands = []
        for v, where in self.dot.operands(op):
            text = self._typed(v, where)
            if dim not in self._value(v, where).dims or (dim.masked and not zero_outside(v)):
                full = where.shape(self._value(v, where).dims | {dim})
                inside = f"{self.places.position(dim, where)} < {self.places.size(dim.size)}"
                text = f"tl.broadcast_to(tl.where({inside}, {text}, {zero(element_of(v))}), {full})"
            operands.append(text)
        exact = self._precision() if isinstance(element_of(self.dot.operands(op)[0][0]), Float32Type) else ""
        dims = frozenset(self.main.dims)
        if self.places.inner is None:
            self._bind(op, self.main, f"tl.dot({', '.join(operands)}{exact})", dims)
            return
        acc = self.namer.fresh("acc")
        self.body.append(f"{acc} = tl.zeros({self.main.shape(dims)}, tl.float32)")
        self._line(f"{acc} = tl.dot({', '.join(operands)}, {acc}{exact})")
        self.values[op.result, self.main] = Val(acc, dims)

    def _precision(self) -> str:
        return f', input_precision="{"tf32" if self.options.tf32 else "ieee"}"'
