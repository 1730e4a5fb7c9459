"""Loads that run across the vector axis: a square tile is read along its own rows and turned in registers.

Where a load's neighbours in memory lie along another parallel axis (a transposed operand), gathering them lane by lane
touches a cache line an element. Instead that axis, too, goes by squares: as many rows as a register has lanes are
read whole, turned over, and kept on the stack; the kernel's body then reads one turned row for every position.
"""

from __future__ import annotations

from xdsl.ir import Operation

from tessera.tile.dialect.index import Index
from tessera.tile.dialect.ops import LoadOp, StoreOp
from tessera.tile.targets.cpu.code import V
from tessera.tile.targets.cpu.elements import Element
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.tile.targets.cpu.layout import Layout, chunk_stride
from tessera.tile.targets.cpu.memory import Chunk, Memory


def tile_axis(seen: Layout, vector: str | None, native: int) -> str | None:
    """The axis to go by squares with the vector axis, if turned loads are worth it and legal."""
    if seen.reduced is not None or vector is None or len(seen.parallel) < 2:
        return None
    stores = [op for op in seen.kernel.block.ops if isinstance(op, StoreOp)]
    if any(op.mode.data == "add" or vector not in seen.axes_of_op(op) for op in stores):
        return None
    for axis in seen.parallel:
        small = seen.sizes[axis].constant
        if axis != vector and turned(seen, vector, axis, native) and (small is None or small >= 8):
            return axis
    return None


def turned(seen: Layout, vector: str, axis: str, native: int) -> list[LoadOp]:
    """Loads whose neighbours lie along `axis` and not, within a register's lanes, along the vector axis."""
    return [
        op
        for op in seen.at
        if isinstance(op, LoadOp) and not op.indices and op.mask is None and _runs(seen, op, vector, axis, native)
    ]


def _runs(seen: Layout, op: Operation, vector: str, axis: str, native: int) -> bool:
    across, along = chunk_stride(seen.at[op], vector, native), seen.at[op].stride(axis)
    return along is not None and along.constant == 1 and (across is None or across.constant not in (0, 1))


def read_tile(
    b: Code, memory: Memory, base: V, e: Element, at: Index, chunk: Chunk, axis: str, columns: V | None
) -> list[V]:
    """Row k of memory at the vector axis's position k, all turned; `columns` masks those beyond the tile's end."""
    first, vector = memory.names[chunk.axis or ""], chunk.axis or ""
    rows = []
    for k in range(chunk.lanes):
        memory.names[vector] = b.bin("add", first, b.const("i64", k)) if k else first
        where = memory.scalar(at)
        inside = columns
        if chunk.mask is not None:
            row = b.splat(b.lane(chunk.mask, k), chunk.lanes)
            inside = row if columns is None else b.bin("and", row, columns)
        rows.append(memory.load_raw(base, e, where, Chunk(axis, chunk.lanes, inside)))
    memory.names[vector] = first
    return turn(b, rows)


def turn(b: Code, rows: list[V]) -> list[V]:
    """Transpose a square by interleaving its halves, as often as halving it reaches one row."""
    n = len(rows)
    low = ", ".join(f"i32 {k // 2 + (n if k % 2 else 0)}" for k in range(n))
    high = ", ".join(f"i32 {n // 2 + k // 2 + (n if k % 2 else 0)}" for k in range(n))
    steps = n.bit_length() - 1
    for _ in range(steps):
        mixed = []
        for x, y in zip(rows[: n // 2], rows[n // 2 :], strict=True):
            for picks in (low, high):
                mixed.append(b.value(f"shufflevector {x}, {y}, <{n} x i32> <{picks}>", x.elem, n))
        rows = mixed
    return rows
