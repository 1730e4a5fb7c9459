"""Products with few rows: x (m, k) by w (n, k), both contiguous along k, and what is computed from them point by point.

The lanes of a register are as many rows of x. A task first turns its rows of x over, so that position k of all of them
is one register; a square of the result is then a register for each of as many rows of w, to which each step along k
adds one element of w, repeated, times that register. The square is turned over once it is complete, kept on the stack,
and the rest of the kernel runs over it row by row. Nothing is summed across lanes, and w is read once, where it stands.

A library blocks for large matrices and copies both operands first; with few rows that costs more than the product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from xdsl.ir import Operation

from tessera.tile.dialect import ContractOp, LoadOp, StoreOp, element_of
from tessera.tile.index import Index
from tessera.tile.targets.cpu.code import V
from tessera.tile.targets.cpu.elements import F32, element
from tessera.tile.targets.cpu.host import Host
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.tile.targets.cpu.layout import Layout
from tessera.tile.targets.cpu.memory import Memory
from tessera.tile.targets.cpu.transpose import turn

LANES = 16  # with fewer, a square leaves most of a core's arithmetic idle
MOST = 64  # rows: with more the library is as fast
FULL = 0.75  # the least share of the lanes that have a row
MOST_DEPTH = 4096  # of x turned over: 256 KB a task, an eighth of a core's second cache
COLUMNS = 64  # of one task
STEPS = 4  # along the depth at once: with more, LLVM goes on with one sum, which waits for itself
ALIGN = 64  # bytes: no register's worth lies across two cache lines


@dataclass(frozen=True)
class Product:
    """The one product of a kernel, the axes of its result, and how deep it is."""

    op: ContractOp
    lhs: LoadOp
    rhs: LoadOp
    rows: str
    columns: str
    depth: int

    def rest(self, seen: Layout) -> list[Operation]:
        """What is left of the kernel, in order: the operands' loads go where nothing else reads them."""
        own = {self.op, *(x for x in (self.lhs, self.rhs) if x.result.has_one_use())}
        return [op for op in seen.kernel.block.ops if op not in own]


def no_product(rows: int, columns: int, depth: int, host: Host) -> str:
    """Why a product of these sizes stays with the library on this machine; empty where it does not."""
    if host.width // 4 != LANES:
        return f"products on a CPU want registers of {LANES} elements"
    if rows > MOST or rows < FULL * LANES * math.ceil(rows / LANES):
        return f"products stay with the library on a CPU, but for a few times {LANES} rows, and no more than {MOST}"
    whole = columns % LANES == 0 and depth % LANES == 0 and depth <= MOST_DEPTH
    return "" if whole else f"products on a CPU want columns and depth that are multiples of {LANES}"


def product_of(seen: Layout, host: Host) -> Product | None:
    """The product of a kernel that is one of these, or None."""
    found = [op for op in seen.kernel.block.ops if isinstance(op, ContractOp)]
    if len(found) != 1 or len(seen.parallel) != 2 or host.width // 4 != LANES or seen.walked is not None:
        return None
    op, k = found[0], found[0].axis.data
    lhs, rhs = op.lhs.owner, op.rhs.owner
    depth = seen.sizes[k].constant if k in seen.sizes else None
    if not isinstance(lhs, LoadOp) or not isinstance(rhs, LoadOp) or depth is None or depth % LANES:
        return None
    for columns, rows in (seen.parallel, seen.parallel[::-1]):
        made = Product(op, lhs, rhs, rows, columns, depth)
        if depth <= MOST_DEPTH and _fits(seen, made):
            return made
    return None


def _fits(seen: Layout, p: Product) -> bool:
    size = seen.sizes[p.columns].constant
    if size is None or size % LANES or seen.sizes[p.rows].constant is None:
        return False
    k = p.op.axis.data
    plain = all(not x.indices and x.mask is None and element(element_of(x.buffer)) == F32 for x in (p.lhs, p.rhs))
    along = (_steps(seen.at[x], p.rows, p.columns, k) for x in (p.lhs, p.rhs))
    (left_row, left_column, left_k), (right_row, right_column, right_k) = along
    apart = left_k == right_k == 1 and left_column == right_row == 0 and left_row and right_column
    stores = [op for op in seen.kernel.block.ops if isinstance(op, StoreOp)]
    return bool(plain and apart) and all(op.mode.data == "set" for op in stores)


def _steps(at: Index, *axes: str) -> list[int | None]:
    strides = [at.stride(a) for a in axes]
    return [None if s is None else s.constant for s in strides]


def room_for(p: Product) -> int:
    """Elements of scratch memory that a task needs, wherever it begins."""
    return p.depth * LANES + ALIGN // 4


class Squares:
    """Writes the product into the code: `pack` once for a block of rows, `square` for a block of columns."""

    def __init__(self, b: Code, memory: Memory, buffers: dict, seen: Layout, product: Product, room: V) -> None:
        self.b, self.memory, self.buffers, self.seen, self.p = b, memory, buffers, seen, product
        end = b.address(room, "i8", b.const("i64", ALIGN - 1))
        self.turned = b.call_named("llvm.ptrmask.p0.i64", "ptr", 0, [end, b.const("i64", -ALIGN)])
        self.kept = b.slot("float", LANES, "square", LANES)

    def pack(self) -> None:
        """The block's rows of x turned over. Rows past the last one repeat it; what they give is never stored."""
        b, rows, size = self.b, self.p.rows, self.memory.extents[self.p.rows]
        first = self.memory.names[rows]
        starts = []
        for i in range(LANES):
            row = b.bin("add", first, b.const("i64", i))
            row = row if size % LANES == 0 else b.call("smin", row, b.const("i64", size - 1))
            starts.append(self._start(self.p.lhs, rows, row))
        self.memory.names[rows] = first
        with b.loop(b.const("i64", 0), b.const("i64", self.p.depth), LANES, "pack") as k:
            lines = [b.load("float", LANES, b.address(p, "float", k)) for p in starts]
            for j, line in enumerate(turn(b, lines)):
                at = b.bin("mul", b.bin("add", k, b.const("i64", j)), b.const("i64", LANES))
                b.store(line, b.address(self.turned, "float", at), ALIGN)

    def square(self) -> None:
        """The product at the present rows and columns, kept."""
        b, columns = self.b, self.p.columns
        first = self.memory.names[columns]
        starts = [self._start(self.p.rhs, columns, b.bin("add", first, b.const("i64", r))) for r in range(LANES)]
        self.memory.names[columns] = first
        sums = [b.slot("float", LANES, "sum") for _ in range(LANES)]
        for s in sums:
            b.store(b.const("float", 0.0, LANES), s)
        with b.loop(b.const("i64", 0), b.const("i64", self.p.depth), STEPS, "depth") as k:
            totals = [b.load("float", LANES, s) for s in sums]
            for j in range(STEPS):
                at = b.bin("add", k, b.const("i64", j))
                line = b.address(self.turned, "float", b.bin("mul", at, b.const("i64", LANES)))
                x = b.load("float", LANES, line, ALIGN)
                for r, start in enumerate(starts):
                    w = b.splat(b.load("float", 0, b.address(start, "float", at)), LANES)
                    totals[r] = b.call("fma", w, x, totals[r])
            for total, s in zip(totals, sums, strict=True):
                b.store(total, s)
        for k, row in enumerate(turn(b, [b.load("float", LANES, s) for s in sums])):
            b.store(row, b.address(self.kept, "float", b.const("i64", k * LANES)), ALIGN)

    def row(self, number: V) -> V:
        """One row of the square, lanes along the columns."""
        at = self.b.bin("mul", number, self.b.const("i64", LANES))
        return self.b.load("float", LANES, self.b.address(self.kept, "float", at), ALIGN)

    def _start(self, op: LoadOp, axis: str, position: V) -> V:
        """Where an operand's row begins."""
        self.memory.names[axis] = position
        self.memory.names[self.p.op.axis.data] = self.b.const("i64", 0)
        return self.b.address(self.buffers[op.buffer], "float", self.memory.scalar(self.seen.at[op]))
