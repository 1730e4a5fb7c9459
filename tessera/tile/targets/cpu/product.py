"""Products with few rows: x (m, k) by w (n, k), both contiguous along k, and what is computed from them point by point.

A block of the result is some rows by SIDE columns, and its rows are the lanes of one or several registers. A task first
turns its rows of x over, so that position k of all of them lies together. Each step along k then adds one element of w,
repeated, times these registers, to the sums of its column; as many columns go at once as the machine has registers for
(`Host`). The sums are turned over once they are complete and kept on the stack, and the rest of the kernel runs over
them row by row. Nothing is summed across lanes, and w is read once a block of rows, where it stands.

A library blocks for large matrices and copies both operands first; with few rows that costs more than the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from xdsl.ir import Operation

from tessera.tile.dialect.index import Index
from tessera.tile.dialect.ops import ContractOp, LoadOp, StoreOp
from tessera.tile.dialect.types import element_of
from tessera.tile.targets.cpu.code import V
from tessera.tile.targets.cpu.elements import F32, element
from tessera.tile.targets.cpu.host import Host
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.tile.targets.cpu.layout import Layout
from tessera.tile.targets.cpu.memory import Memory
from tessera.tile.targets.cpu.transpose import turn

SIDE = 16  # columns of a block: its rows are then long enough for what is computed after it
MOST = 64  # rows: with more the library is as fast
FULL = 0.75  # the least share of the lanes that have a row
COLUMNS = 64  # of one task
STEPS = 4  # along the depth at once, at most: with more, LLVM goes on with one sum, which waits for itself
ALIGN = 64  # bytes: no register's worth lies across two cache lines


def most_depth(host: Host) -> int:
    """Of x turned over, which a task reads for every column."""
    return host.cached // (4 * SIDE)


def block_rows(rows: int, host: Host) -> int:
    """Rows of a block: registers full of them, as many as leave few lanes empty; 0 where too many would be."""
    fits = (n for n in (16, 8, 4) if n >= host.lanes and rows >= FULL * n * math.ceil(rows / n))
    return next(fits, 0)


def at_once(block: int, host: Host) -> tuple[int, int]:
    """How many columns, and then how many steps along the depth, leave sums, x and w in registers.

    LLVM reads the lines of x for all steps first. Where a lane of w can be a factor, each column's w is held too.
    """
    lines = block // host.lanes

    def fits(columns: int, steps: int) -> bool:
        return columns * lines + steps * lines + (columns if host.by_lane else 1) <= host.registers

    columns = next((n for n in (16, 8, 4, 2) if fits(n, 1)), 1)
    return columns, next((n for n in (STEPS, 2) if fits(columns, n)), 1)


@dataclass(frozen=True)
class Product:
    """The one product of a kernel, the axes of its result, and how deep it is."""

    op: ContractOp
    lhs: LoadOp
    rhs: LoadOp
    rows: str
    columns: str
    depth: int
    block: int  # rows that go together

    def rest(self, seen: Layout) -> list[Operation]:
        """What is left of the kernel, in order: the operands' loads go where nothing else reads them."""
        own = {self.op, *(x for x in (self.lhs, self.rhs) if x.result.has_one_use())}
        return [op for op in seen.kernel.block.ops if op not in own]


def no_product(rows: int, columns: int, depth: int, host: Host) -> str:
    """Why a product of these sizes stays with the library on this machine; empty where it does not."""
    if not host.fma:
        return "products on a CPU want a processor that multiplies and adds at once"
    if rows > MOST or not block_rows(rows, host):
        return (
            f"products stay with the library on a CPU, but for about as many rows as fill registers of {host.lanes} "
            f"elements, and no more than {MOST}"
        )
    whole = columns % SIDE == 0 and depth % _step(host) == 0 and depth <= most_depth(host)
    return (
        ""
        if whole
        else (
            f"products on a CPU want columns and a depth that are multiples of {SIDE} and {_step(host)}, "
            f"and a depth of at most {most_depth(host)}"
        )
    )


def _step(host: Host) -> int:
    """What the depth is a multiple of: x is turned over a register at a time."""
    return max(host.lanes, STEPS)


def product_of(seen: Layout, host: Host) -> Product | None:
    """The product of a kernel that is one of these, or None."""
    contractions = [op for op in seen.kernel.block.ops if isinstance(op, ContractOp)]
    if len(contractions) != 1 or len(seen.parallel) != 2 or not host.fma or seen.sequential is not None:
        return None
    op, k = contractions[0], contractions[0].axis.data
    lhs, rhs = op.lhs.owner, op.rhs.owner
    depth = seen.sizes[k].constant if k in seen.sizes else None
    if not isinstance(lhs, LoadOp) or not isinstance(rhs, LoadOp) or depth is None or depth % _step(host):
        return None
    for columns, rows in (seen.parallel, seen.parallel[::-1]):
        size = seen.sizes[rows].constant
        product = Product(op, lhs, rhs, rows, columns, depth, block_rows(size or 0, host) or max(host.lanes, STEPS))
        if size is not None and depth <= most_depth(host) and _fits(seen, product):
            return product
    return None


def _fits(seen: Layout, p: Product) -> bool:
    size = seen.sizes[p.columns].constant
    if size is None or size % SIDE:
        return False
    k = p.op.axis.data
    plain = all(not x.indices and x.mask is None and element(element_of(x.buffer)) == F32 for x in (p.lhs, p.rhs))
    along = (_steps(seen.at[x], p.rows, p.columns, k) for x in (p.lhs, p.rhs))
    (left_row, left_column, left_k), (right_row, right_column, right_k) = along
    separate = left_k == right_k == 1 and left_column == right_row == 0 and left_row and right_column
    stores = [op for op in seen.kernel.block.ops if isinstance(op, StoreOp)]
    return bool(plain and separate) and all(op.mode.data == "set" for op in stores)


def _steps(at: Index, *axes: str) -> list[int | None]:
    strides = [at.stride(a) for a in axes]
    return [None if s is None else s.constant for s in strides]


def room_for(p: Product) -> int:
    """Elements of scratch memory that a task needs, wherever it begins."""
    return p.depth * p.block + ALIGN // 4


class Blocks:
    """Writes the product into the code: `pack` once for a block of rows, `block` for a block of columns."""

    def __init__(self, b: Code, memory: Memory, buffers: dict, seen: Layout, product: Product, room: V) -> None:
        self.b, self.memory, self.buffers, self.seen, self.p = b, memory, buffers, seen, product
        end = b.address(room, "i8", b.const("i64", ALIGN - 1))
        self.turned = b.call_named("llvm.ptrmask.p0.i64", "ptr", 0, [end, b.const("i64", -ALIGN)])
        self.kept = b.slot("float", SIDE, "block", product.block)

    def pack(self) -> None:
        """The block's rows of x turned over. Rows past the last one repeat it; what they give is never stored."""
        b, rows, size, block = self.b, self.p.rows, self.memory.extents[self.p.rows], self.p.block
        first, side = self.memory.names[rows], b.host.lanes
        starts = []
        for i in range(block):
            row = b.bin("add", first, b.const("i64", i))
            row = row if size % block == 0 else b.call("smin", row, b.const("i64", size - 1))
            starts.append(self._start(self.p.lhs, rows, row))
        self.memory.names[rows] = first
        with b.loop(b.const("i64", 0), b.const("i64", self.p.depth), side, "pack") as k:
            for i in range(0, block, side):
                lines = [b.load("float", side, b.address(p, "float", k)) for p in starts[i : i + side]]
                for j, line in enumerate(turn(b, lines)):
                    at = b.bin("mul", b.bin("add", k, b.const("i64", j)), b.const("i64", block))
                    b.store(line, b.address(self.turned, "float", b.bin("add", at, b.const("i64", i))), side * 4)

    def block(self) -> None:
        """The product at the present rows and columns, kept."""
        columns, steps = at_once(self.p.block, self.b.host)
        for first in range(0, SIDE, columns):
            self._keep(self._sums(first, columns, steps), first)

    def _sums(self, first: int, count: int, steps: int) -> list[V]:
        """Some columns of the block, each with its rows as lanes."""
        b, columns, block = self.b, self.p.columns, self.p.block
        at = self.memory.names[columns]
        numbers = (b.bin("add", at, b.const("i64", first + r)) for r in range(count))
        starts = [self._start(self.p.rhs, columns, number) for number in numbers]
        self.memory.names[columns] = at
        sums = [b.slot("float", block, "sum") for _ in range(count)]
        for s in sums:
            b.store(b.const("float", 0.0, block), s)
        with b.loop(b.const("i64", 0), b.const("i64", self.p.depth), steps, "depth") as k:
            totals = [b.load("float", block, s) for s in sums]
            factors = [self._factors(start, k, steps) for start in starts]
            for j in range(steps):
                line = b.bin("mul", b.bin("add", k, b.const("i64", j)), b.const("i64", block))
                x = b.load("float", block, b.address(self.turned, "float", line), min(ALIGN, block * 4))
                totals = [b.call("fma", f(j), x, t) for f, t in zip(factors, totals, strict=True)]
            for total, s in zip(totals, sums, strict=True):
                b.store(total, s)
        return [b.load("float", block, s) for s in sums]

    def _factors(self, start: V, k: V, steps: int) -> Callable[[int], V]:
        """Step j's element of a row of w, repeated: a lane of a register, or from memory."""
        b, block = self.b, self.p.block
        if b.host.by_lane and steps > 1:
            held = b.load("float", steps, b.address(start, "float", k))
            return lambda j: b.splat(b.lane(held, j), block)

        def from_memory(j: int) -> V:
            at = b.bin("add", k, b.const("i64", j))
            return b.splat(b.load("float", 0, b.address(start, "float", at)), block)

        return from_memory

    def _keep(self, sums: list[V], first: int) -> None:
        """These columns turned over, by squares that fit registers."""
        b, side = self.b, min(self.b.host.lanes, len(sums))
        for i in range(0, self.p.block, side):
            for j in range(0, len(sums), side):
                rows = turn(b, [b.part(s, i, side) for s in sums[j : j + side]])
                for k, row in enumerate(rows):
                    at = b.const("i64", (i + k) * SIDE + first + j)
                    b.store(row, b.address(self.kept, "float", at), side * 4)

    def row(self, number: V) -> V:
        """One row of the block, lanes along the columns."""
        at = self.b.bin("mul", number, self.b.const("i64", SIDE))
        return self.b.load("float", SIDE, self.b.address(self.kept, "float", at), ALIGN)

    def _start(self, op: LoadOp, axis: str, position: V) -> V:
        """Where an operand's row begins."""
        self.memory.names[axis] = position
        self.memory.names[self.p.op.axis.data] = self.b.const("i64", 0)
        return self.b.address(self.buffers[op.buffer], "float", self.memory.scalar(self.seen.at[op]))
