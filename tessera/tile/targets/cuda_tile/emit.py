"""Emits cuTile Python from a kernel and a schedule.

In: a kernel, a schedule whose blocks are powers of two. Out: the text of a module with one `@ct.kernel` function, whose
parameters are the arrays of `arrays`, then the symbols. A value of the dialect is a tile with one dimension for every
axis it varies over, of the axis's block. One program computes one block of every parallel axis; the reduced axis is
held whole in one block, or read in a loop (`Schedule.loop`) whose passes come from `schedule.plan`.

Lanes past the end of an axis hold anything; loads pad them with zeros, stores drop them, and what combines lanes along
the reduced axis puts its identity there first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from xdsl.dialects.builtin import AnyFloat, FloatAttr, IntegerAttr, IntegerType
from xdsl.ir import Attribute, Operation, SSAValue

from tessera.tile.dialect.index import Index
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
    ReduceOp,
    ScanOp,
    StoreOp,
)
from tessera.tile.dialect.types import axes_of, element_of
from tessera.tile.rewrites.copying import zero_outside
from tessera.tile.schedules.schedule import Schedule, inner_axis, plan, reduced_axis
from tessera.tile.targets.cuda_tile.arrays import Arrays, arrays
from tessera.tile.targets.cuda_tile.functions import helpers, template, type_name
from tessera.tile.targets.cuda_tile.reductions import combine_text, identity, literal, whole_text
from tessera.tile.targets.cuda_tile.writing import Product, Scope, Text, Tile
from tessera.util.errors import OptionError
from tessera.util.powers import power_of_two

I1 = IntegerType(1)
SMALLEST = 16  # a side of a tile of a matrix product


def programs_of(kernel: KernelOp) -> tuple[str, ...]:
    """The axes that programs are shared out over: a sequential one is not among them."""
    return tuple(a for a in kernel.axis_names(PARALLEL) if a != kernel.sequential_axis)


def blocks_of(kernel: KernelOp, schedule: Schedule) -> dict[str, int]:
    """The block of every axis; refuses a schedule that this target cannot follow."""
    blocks = {a: schedule.block(a) for a in kernel.axis_names()}
    name = kernel.sym_name.data
    if (inner := inner_axis(kernel)) is not None:  # held whole, on the matrix units
        width = kernel.axis(inner).size.expr.constant
        if width is None or not schedule.loop:
            raise OptionError(f"{name}: expected a known size of {inner!r} and a schedule with loop=True")
        blocks[inner] = max(power_of_two(width), SMALLEST)
    if unknown := {a for a, _ in schedule.blocks} - set(blocks):
        raise OptionError(f"{name}: expected blocks over some of {kernel.axis_names()}, got {sorted(unknown)}")
    if odd := {a: n for a, n in blocks.items() if n < 1 or n & (n - 1)}:
        raise OptionError(f"{name}: expected blocks that are powers of two, got {odd}")
    if schedule.split != 1 or schedule.persistent:
        raise OptionError(f"{name}: expected a schedule with split=1 and persistent=False, got {schedule}")
    axis = reduced_axis(kernel)
    if kernel.sequential_axis is not None and schedule.loop:
        raise OptionError(
            f"{name} sums along {kernel.sequential_axis!r}: expected {axis!r} in one block, got loop=True"
        )
    size = None if axis is None else kernel.axis(axis).size.expr.constant
    if axis is not None and size is not None and not schedule.loop and size > blocks[axis]:
        raise OptionError(f"{name}: a block of {blocks[axis]} cannot hold the {size} of {axis!r}; try loop=True")
    return blocks


class Emitter:
    def __init__(self, kernel: KernelOp, schedule: Schedule) -> None:
        self.kernel, self.schedule = kernel, schedule
        self.blocks = blocks_of(kernel, schedule)
        self.sizes = {a.axis.data: a.size.expr for a in kernel.axes}
        self.order = kernel.axis_names()
        self.parallel = programs_of(kernel)
        self.reduced = reduced_axis(kernel)
        self.arrays: Arrays = arrays(kernel)
        self.tiles: dict[SSAValue, Tile] = {}
        self.names: dict[SSAValue, str] = {}
        self.scope = self.top = Scope(4)
        self.loop: Scope | None = None
        self.along: str | None = None  # the axis of that loop
        self.after: list[str] = []  # lines that follow the loop being emitted

    # --- the module ---

    def write(self) -> None:
        """Every operation of the kernel, in order."""
        if self.schedule.loop and self.reduced is not None:
            self._passes()
        else:
            for op in self.kernel.block.ops:
                self.operation(op)

    def module(self) -> str:
        self.write()
        body = "\n".join(self.top.lines())
        flags = ", ".join(f"{k}={v}" for k, v in sorted(dict(self.schedule.extra).items()))
        symbols = [f"{s.data}: ct.ScalarInt64" for s in self.kernel.symbol_names]
        parameters = ", ".join([*(a.name for a in self.arrays.all), *symbols])
        text = f"@ct.kernel{f'({flags})' if flags else ''}\ndef {self.kernel.sym_name.data}({parameters}):\n"
        text += "\n".join([*(f"    {line}" for line in self._programs()), body, ""])
        used = ", ".join(f"{a}={n}" for a, n in self.blocks.items())
        return f'"""Blocks: {used or "none"}."""\n\nimport cuda.tile as ct\n{helpers(text)}\n\n{text}'

    def _programs(self) -> list[str]:
        """Which block of every parallel axis this program computes; the last axis varies fastest."""
        if not self.parallel:
            return []
        steps = {a: self.steps(a) for a in self.parallel}
        lines = ["program = ct.bid(0)"]
        left = [a for a in self.parallel if steps[a] != "1"]
        lines += [f"{a}_tile = 0" for a in self.parallel if steps[a] == "1"]
        if self.schedule.group > 1 and len(left) >= 2:
            return [*lines, *self._grouped(left, steps)]
        for k, a in reversed(list(enumerate(left))):
            if k == 0:
                lines.append(f"{a}_tile = program")
            else:
                lines += [f"{a}_tile = program % {steps[a]}", f"program = program // {steps[a]}"]
        return lines

    def _grouped(self, left: list[str], steps: dict[str, str]) -> list[str]:
        """The last two axes are taken in bands of `group` rows, so that programs side by side share their loads."""
        *outer, row, column = left
        group = self.schedule.group
        lines = [f"rows, columns = {steps[row]}, {steps[column]}"]
        if outer:
            lines += ["outer = program // (rows * columns)", "program = program % (rows * columns)"]
            for k, a in reversed(list(enumerate(outer))):
                lines.append(f"{a}_tile = outer" if k == 0 else f"{a}_tile = outer % {steps[a]}")
                if k:
                    lines.append(f"outer = outer // {steps[a]}")
        return [
            *lines,
            f"first = program // ({group} * columns) * {group}",
            f"height = ct.minimum(rows - first, {group})",
            f"{row}_tile = first + program % ({group} * columns) % height",
            f"{column}_tile = program % ({group} * columns) // height",
        ]

    def steps(self, axis: str) -> str:
        """How many blocks an axis has."""
        block, size = self.blocks[axis], self.sizes[axis]
        if size.constant is not None:
            return str(-(-size.constant // block))
        text = self._symbolic(size)
        return text if block == 1 else f"ct.cdiv({text}, {block})"

    # --- loops ---

    def _passes(self) -> None:
        for part in plan(self.kernel):
            if part.axis is None:
                for op in part.ops:
                    self.operation(op)
                continue
            self.enter(part.axis)
            for op in part.ops:
                self.operation(op)
            self.leave(self.steps(part.axis))

    def enter(self, axis: str) -> None:
        """What is written from here on stands in a loop along an axis."""
        self.loop = self.scope = Scope(8)
        self.after, self.along = [], axis

    def leave(self, steps: str) -> None:
        assert self.loop is not None
        self.top.body.append(f"for {self.along}_tile in range({steps}):")
        loop, self.scope, self.loop, self.along = self.loop, self.top, None, None
        self.top.body += [line[4:] for line in loop.lines()]
        self.top.body += self.after

    def before_loop(self, line: str) -> None:
        self.top.body.append(line)

    # --- operations ---

    def operation(self, op: Operation) -> None:
        if isinstance(op, StoreOp):
            self._store(op)
            return
        if isinstance(op, ConstantOp):
            self.tiles[op.result] = Tile(self._constant(op), ())
            return
        result = op.results[0]
        text = self._value(op)
        if text is not None:
            self.tiles[result] = self.assign(self.name_of(result), text)

    def assign(self, name: str, tile: Tile) -> Tile:
        self.scope.body.append(f"{name} = {tile.text}")
        return Tile(name, tile.axes)

    def name_of(self, v: SSAValue) -> str:
        return self.names.setdefault(v, f"v{len(self.names)}")

    def _value(self, op: Operation) -> Tile | None:
        match op:
            case LoadOp():
                return self._load(op)
            case IotaOp():
                text = self.index(op.at.expr, axes_of(op.result), [self.tiles[v] for v in op.indices])
                return Tile(f"ct.astype({text}, ct.int64)" if not axes_of(op.result) else text, axes_of(op.result))
            case ApplyOp():
                return self._apply(op)
            case CastOp():
                tile = self.tiles[op.arg]
                return Tile(self._cast(tile.text, element_of(op.arg), element_of(op.result)), tile.axes)
            case ReduceOp():
                return self.reduce(op)
            case ScanOp():
                return self._scan(op)
            case ContractOp():
                return self.contract(op)
            case RandomOp():
                axes = axes_of(op.result)
                return Tile(f"_philox({self.aligned(op.seed, axes)}, {self.aligned(op.offset, axes)})", axes)
        raise OptionError(f"the CUDA Tile target has no {op.name}; target 'triton' has all of the dialect")

    def _constant(self, op: ConstantOp) -> str:
        assert isinstance(op.value, (IntegerAttr, FloatAttr))
        number, element = op.value.value.data, element_of(op.result)
        text = literal(number, element)
        # A bare number takes the type of the tile beside it; alone it would have none.
        beside = all(
            isinstance(u.operation, ApplyOp)
            and any(element_of(v) == element and not isinstance(v.owner, ConstantOp) for v in u.operation.args)
            for u in op.result.uses
        )
        bare = beside and (element == I1 or math.isfinite(number))
        return text if bare else f"ct.full((), {text}, {type_name(element)})"

    def _apply(self, op: ApplyOp) -> Tile:
        axes = axes_of(op.result)
        operand = op.args[-1] if op.fn.data == "select" else op.args[0]
        args = [self.aligned(v, axes) for v in op.args]
        return Tile(template(op.fn.data, element_of(operand)).format(*args), axes)

    def _cast(self, text: str, before: Attribute, after: Attribute) -> str:
        return f"{text} != 0" if after == I1 else f"ct.astype({text}, {type_name(after)})"

    # --- shapes ---

    def shape(self, axes: Sequence[str]) -> str:
        return str(tuple(self.blocks[a] for a in axes))

    def arrange(self, tile: Tile, axes: tuple[str, ...]) -> str:
        """The tile with its dimensions in this order; `axes` are some order of its own."""
        if tile.axes == axes:
            return tile.text
        return f"ct.permute({tile.text}, {tuple(tile.axes.index(a) for a in axes)})"

    def aligned(self, v: SSAValue | Tile, axes: tuple[str, ...]) -> str:
        """The value written so that it broadcasts to these axes."""
        tile = v if isinstance(v, Tile) else self.tiles[v]
        own = tuple(a for a in axes if a in tile.axes)
        text = self.arrange(tile, own)
        if not own or own == axes[len(axes) - len(own) :]:
            return text
        return f"{text}[{', '.join(':' if a in own else 'None' for a in axes)}]"

    def whole(self, v: SSAValue, axes: tuple[str, ...]) -> str:
        """The value as a tile of exactly these axes."""
        tile = self.tiles[v]
        if set(tile.axes) == set(axes) and axes:
            return self.arrange(tile, axes)
        return f"ct.broadcast_to({self.aligned(v, axes)}, {self.shape(axes)})" if axes else tile.text

    # --- positions ---

    def tile_of(self, axis: str) -> str:
        """The number of the block along an axis."""
        return f"{axis}_tile" if axis in (*self.parallel, self.along) else "0"

    def position(self, axis: str) -> Tile:
        """Positions along an axis, as a row."""
        scope = self.loop if self.loop and axis == self.along else self.top
        block, tile = self.blocks[axis], self.tile_of(axis)
        line = f"{axis}_at = ct.arange({block}, dtype=ct.int64)"
        if tile != "0":
            line += f" + {tile} * {block}" if block > 1 else f" + {tile}"
        if line not in scope.head:
            scope.head.append(line)
        return Tile(f"{axis}_at", (axis,))

    def masked(self, axis: str) -> bool:
        """Whether the last block reaches past the end."""
        size = self.sizes[axis].constant
        return self.blocks[axis] > 1 and (size is None or size % self.blocks[axis] != 0)

    def inside(self, axis: str) -> Tile:
        return Tile(f"({self.position(axis).text} < {self._symbolic(self.sizes[axis])})", (axis,))

    def bounds(self, axes: Iterable[str], target: tuple[str, ...]) -> list[str]:
        """Terms that say a lane is inside every axis."""
        return [self.aligned(self.inside(a), target) for a in axes if self.masked(a)]

    def _symbolic(self, expr: Index) -> str:
        return expr.evaluate(Text, lambda n: Text(str(n) if n >= 0 else f"({n})")).text

    def index(self, expr: Index, axes: tuple[str, ...], indices: Sequence[Tile]) -> str:
        """An index expression over tiles that broadcast to `axes`."""

        def look(name: str) -> Text:
            if name in self.sizes:
                return Text(self.aligned(self.position(name), axes))
            if name.startswith("_") and name[1:].isdigit():
                return Text(f"ct.astype({self.aligned(indices[int(name[1:])], axes)}, ct.int64)")
            return Text(name)

        return expr.evaluate(look, lambda n: Text(str(n) if n >= 0 else f"({n})")).text

    # --- memory ---

    def _load(self, op: LoadOp) -> Tile:
        array = self.arrays.of[op]
        axes = axes_of(op.result)
        if not array.flat:
            place = ", ".join(self.tile_of(a) for a in array.axes)
            inside = not any(self.masked(a) for a in array.axes)
            edge = "check_bounds=False" if inside else "padding_mode=ct.PaddingMode.ZERO"
            place += "," if len(array.axes) == 1 else ""
            return Tile(f"ct.load({array.name}, ({place}), {self.shape(array.axes)}, {edge})", array.axes)
        where = self._offsets(op, axes)
        terms = self.bounds(axes, axes)
        if op.mask is not None:
            terms.append(self.aligned(op.mask, axes))
        extra = f", mask={self._all(terms, axes)}" if terms else ""
        if op.other is not None:
            extra += f", padding_value={self.aligned(op.other, axes)}"
        return Tile(f"{array.name}.get_raw_memory().load_offset({where}{extra})", axes)

    def _offsets(self, op: LoadOp | StoreOp, axes: tuple[str, ...]) -> str:
        text = self.index(op.at.expr, axes, [self.tiles[v] for v in op.indices])
        used = set(op.at.expr.names()).union(*(axes_of(v) for v in op.indices), ())
        if set(axes) <= used:
            return text
        if not used & set(axes):
            return f"ct.full({self.shape(axes)}, {text}, ct.int64)"
        return f"ct.broadcast_to({text}, {self.shape(axes)})"

    def _all(self, terms: list[str], axes: tuple[str, ...]) -> str:
        text = " & ".join(terms)
        return f"ct.broadcast_to({text}, {self.shape(axes)})" if axes else text

    def _store(self, op: StoreOp) -> None:
        array = self.arrays.of[op]
        if not array.flat:
            place = ", ".join(self.tile_of(a) for a in array.axes)
            edge = "" if any(self.masked(a) for a in array.axes) else ", check_bounds=False"
            place += "," if len(array.axes) == 1 else ""
            self.scope.body.append(f"ct.store({array.name}, ({place}), {self.whole(op.value, array.axes)}{edge})")
            return
        used = op.at.expr.names().union(*(axes_of(v) for v in op.operands if v is not op.buffer))
        axes = tuple(a for a in self.order if a in used)
        where = self._offsets(op, axes)
        terms = self.bounds(axes, axes)
        if op.mask is not None:
            terms.append(self.aligned(op.mask, axes))
        # Programs that differ only in axes the store does not know would all do it: only the first ones may.
        terms += [f"({a}_tile == 0)" for a in self.parallel if a not in axes and self.steps(a) != "1"]
        extra = f", mask={self._all(terms, axes)}" if terms else ""
        verb = "store_offset" if op.mode.data == "set" else "atomic_add_offset"
        value = self.whole(op.value, axes)
        self.scope.body.append(f"{array.name}.get_raw_memory().{verb}({where}, {value}{extra})")

    # --- along the reduced axis ---

    def padded(self, v: SSAValue, fill: str, axis: str) -> str:
        """The value with `fill` in the lanes past the end of an axis."""
        tile = self.tiles[v]
        if axis not in tile.axes or not self.masked(axis):
            return tile.text
        if fill == "0" and zero_outside(v):
            return tile.text
        inside = self.aligned(self.inside(axis), tile.axes)
        return f"ct.where({inside}, {tile.text}, {fill})"

    def reduce(self, op: ReduceOp) -> Tile | None:
        kind, element, tile = op.kind.data, element_of(op.arg), self.tiles[op.arg]
        dim = tile.axes.index(op.axis.data)
        left = tuple(a for a in tile.axes if a != op.axis.data)
        name = self.name_of(op.result)
        fill = identity(kind, element)
        arg = self.padded(op.arg, fill, op.axis.data)
        if kind in ("argmax", "argmin"):
            return self._place_of_best(op, arg, dim, left)
        whole = whole_text(kind, element)
        if self.along != op.axis.data:
            return Tile(whole.format(arg, dim), left)
        self.before_loop(f"{name}_part = ct.full({self.shape(tile.axes)}, {fill}, {type_name(element)})")
        self.scope.body.append(f"{name}_part = {combine_text(kind, element).format(f'{name}_part', arg)}")
        self.after.append(f"{name} = {whole.format(f'{name}_part', dim)}")
        self.tiles[op.result] = Tile(name, left)
        return None

    def _place_of_best(self, op: ReduceOp, arg: str, dim: int, left: tuple[str, ...]) -> Tile | None:
        kind, element, name = op.kind.data, element_of(op.arg), self.name_of(op.result)
        nan = ", propagate_nan=True" if isinstance(element, AnyFloat) else ""
        if element == I1:
            arg = f"ct.astype({arg}, ct.int32)"
        if self.along != op.axis.data:
            return Tile(f"ct.astype(ct.{kind}({arg}, {dim}{nan}), ct.int64)", left)
        axis = op.axis.data
        held = IntegerType(32) if element == I1 else element
        best, at = f"{name}_best", name
        self.before_loop(f"{best} = ct.full({self.shape(left)}, {identity(kind, held)}, {type_name(held)})")
        self.before_loop(f"{at} = ct.zeros({self.shape(left)}, ct.int64)")
        self.scope.body += [
            f"{name}_here = {arg}",
            f"{name}_new = ct.{kind[3:]}({name}_here, {dim}{nan})",
            f"{name}_wins = {name}_new {'>' if kind == 'argmax' else '<'} {best}",
        ]
        if isinstance(element, AnyFloat):
            wins = f"{name}_wins | (ct.isnan({name}_new) & (ct.isnan({best}) ^ True))"
            self.scope.body.append(f"{name}_wins = {wins}")
        place = f"ct.astype(ct.{kind}({name}_here, {dim}{nan}), ct.int64) + {axis}_tile * {self.blocks[axis]}"
        self.scope.body += [
            f"{at} = ct.where({name}_wins, {place}, {at})",
            f"{best} = ct.where({name}_wins, {name}_new, {best})",
        ]
        self.tiles[op.result] = Tile(name, left)
        return None

    def _scan(self, op: ScanOp) -> Tile:
        kind, element, tile = op.kind.data, element_of(op.arg), self.tiles[op.arg]
        dim, name, fill = tile.axes.index(op.axis.data), self.name_of(op.result), identity(kind, element)
        combine = combine_text(kind, element)
        text = {"sum": f"ct.cumsum({{0}}, {dim})", "prod": f"ct.cumprod({{0}}, {dim})"}.get(
            kind, f"ct.scan({{0}}, {dim}, lambda a, b: {combine.format('a', 'b')}, {fill})"
        )
        if self.along != op.axis.data:
            return Tile(text.format(tile.text), tile.axes)
        # The lanes past the end are the last ones: nothing that is stored comes after them.
        keep = tuple(1 if a == op.axis.data else self.blocks[a] for a in tile.axes)
        self.before_loop(f"{name}_carry = ct.full({keep}, {fill}, {type_name(element)})")
        self.scope.body.append(f"{name} = {combine.format(f'{name}_carry', text.format(tile.text))}")
        total = whole_text(kind, element).replace("{1}", "{1}, keepdims=True").format(tile.text, dim)
        self.scope.body.append(f"{name}_carry = {combine.format(f'{name}_carry', total)}")
        return Tile(name, tile.axes)

    # --- matrix products ---

    def contract(self, op: ContractOp) -> Tile | None:
        product = self.product(op)
        if self.along != op.axis.data:
            return Tile(product.whole.format(product.step(product.start)), product.axes)
        name = self.name_of(op.result)
        part = name if product.whole == "{0}" else f"{name}_part"
        self.before_loop(f"{part} = {product.start}")
        self.scope.body.append(f"{part} = {product.step(part)}")
        if part != name:
            self.after.append(f"{name} = {product.whole.format(part)}")
        self.tiles[op.result] = Tile(name, product.axes)
        return None

    def product(self, op: ContractOp) -> Product:
        """One step of a matrix product in the words of the matrix units."""
        depth = op.axis.data
        lhs, rhs = self.tiles[op.lhs].axes, self.tiles[op.rhs].axes
        batch = tuple(a for a in self.order if a in lhs and a in rhs and a != depth)
        rows = tuple(a for a in self.order if a in lhs and a not in rhs)
        columns = tuple(a for a in self.order if a in rhs and a not in lhs)
        if depth not in lhs or depth not in rhs or any(self.blocks[a] != 1 for a in batch):
            raise OptionError(f"expected both sides of a product to vary over {depth!r}, and blocks of 1 over {batch}")
        m, n, k = (math.prod(self.blocks[a] for a in group) for group in (rows, columns, (depth,)))
        left = self._matrix(op.lhs, depth, (*batch, *rows, depth), (m, k))
        right = self._matrix(op.rhs, depth, (*batch, depth, *columns), (k, n))
        axes = (*batch, *rows, *columns)
        start = f"ct.zeros({(m, n)}, {type_name(element_of(op.result))})"
        return Product(left, right, start, axes, "{0}" if len(axes) == 2 else f"ct.reshape({{0}}, {self.shape(axes)})")

    def _matrix(self, v: SSAValue, depth: str, axes: tuple[str, ...], shape: tuple[int, int]) -> str:
        padded = Tile(self.padded(v, "0", depth), self.tiles[v].axes)
        text = self.arrange(padded, axes)
        return text if len(axes) == 2 else f"ct.reshape({text}, {shape})"
