"""Skinny GEMM: two to sixteen rows of x; weights go from memory to the matrix units without a stop.

The matrix units want a thread to hold, of every 16 columns, two and two that stand eight apart; memory wants it to read
eight columns that stand together. Which column is which does not matter to a sum over columns, so w and x are both
loaded as memory wants and their columns called as the matrix units want (`left`, `_right`): nothing passes through
shared memory but one sum over the warps, each of which has columns of its own. What is in flight is in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tessera.ops.rows.kernels.gemv import activated, of_program

FROM_LAST = tl.constexpr(tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 7))


@triton.jit
def iota(COUNT: tl.constexpr, AXIS: tl.constexpr):
    """0, 1, … along one of the five axes of a tile, counted as Triton hands them to threads (see `tile`)."""
    axis: tl.constexpr = 3 - AXIS if FROM_LAST and AXIS < 4 else AXIS
    numbers = tl.arange(0, COUNT)
    if axis == 0:
        numbers = numbers[:, None, None, None, None]
    elif axis == 1:
        numbers = numbers[None, :, None, None, None]
    elif axis == 2:
        numbers = numbers[None, None, :, None, None]
    elif axis == 3:
        numbers = numbers[None, None, None, :, None]
    else:
        numbers = numbers[None, None, None, None, :]
    return numbers


@triton.jit
def tile(at, columns, k, EVEN: tl.constexpr, EVICT: tl.constexpr):
    """Elements at a tile of addresses, axes in their order; nothing where columns end, unless k is `EVEN`.

    The last axis stands together in memory. Triton gives threads to it first, then to the first axis, then warps to the
    second; from 3.7 on it begins with the last of these, for which reason they come the other way round there.
    """
    if EVEN:
        x = tl.load(at, eviction_policy=EVICT)
    else:
        x = tl.load(at, mask=columns < k, other=0.0, eviction_policy=EVICT)
    if FROM_LAST:
        x = tl.permute(x, (3, 2, 1, 0, 4))
    return x


@triton.jit
def _columns(start, SPLIT: tl.constexpr, DEPTH: tl.constexpr):
    """Columns as (1, warp, 1, 32 at a time, 32 that stand together)."""
    return start + iota(SPLIT, 1) * DEPTH + iota(DEPTH // 32, 3) * 32 + iota(32, 4)


@triton.jit
def _numbers(first, COUNT: tl.constexpr):
    """COUNT numbers from `first`, as (8, 1, eights, 1, 1)."""
    return first + iota(COUNT // 8, 2) * 8 + iota(8, 0)


@triton.jit
def left(w, BLOCK: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr):
    """Loaded weights as (warp, row, column)."""
    w = tl.reshape(w, (8, SPLIT, BLOCK // 8, DEPTH // 32, 4, 2, 2, 2))
    return tl.reshape(tl.permute(w, (1, 2, 0, 3, 5, 6, 4, 7)), (SPLIT, BLOCK, DEPTH))


@triton.jit
def _right(x, ROWS: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr):
    """Loaded inputs as (warp, column, row), the columns as in `left`."""
    x = tl.reshape(x, (8, SPLIT, ROWS // 8, DEPTH // 32, 4, 2, 2, 2))
    return tl.reshape(tl.permute(x, (1, 3, 5, 6, 4, 7, 2, 0)), (SPLIT, DEPTH, ROWS))


@triton.jit
def _stored(w_ptr, rows, columns, k, EVEN: tl.constexpr):
    """A block of weights; nothing before it in the stream makes them."""
    return tile(w_ptr + rows.to(tl.int64) * k + columns, columns, k, EVEN, "evict_first")


@triton.jit
def skinny_gemm(
    x_ptr, g_ptr, r_ptr, w0, w1, w2, s0, s1, s2, b0, b1, b2, y0, y1, y2, n0, n1, n2, second, third, rows, k, eps, shift,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block of one weight's outputs for all rows of x."""
    if PDL:
        gdc_launch_dependents()
    w_ptr, s_ptr, b_ptr, y_ptr, n, block = of_program(
        tl.program_id(0), second, third, w0, w1, w2, s0, s1, s2, b0, b1, b2, y0, y1, y2, n0, n1, n2
    )
    dtype = x_ptr.dtype.element_ty
    outputs = tl.minimum(_numbers(block * BLOCK, BLOCK), n - 1)  # what is computed twice is stored once
    which = tl.minimum(_numbers(0, ROWS), rows - 1)
    y = tl.zeros((SPLIT, BLOCK, ROWS), tl.float32)
    up = tl.zeros((SPLIT, BLOCK, ROWS), tl.float32)
    squares = tl.zeros((8, SPLIT, ROWS // 8, 32), tl.float32)
    step: tl.constexpr = SPLIT * DEPTH
    for start in range(0, k, step):
        columns = _columns(start, SPLIT, DEPTH)
        w = _stored(w_ptr, outputs, columns, k, EVEN)
        if GATE > 0:
            u = _stored(w1, outputs, columns, k, EVEN)
        if NORM:  # as a tile like that of x: it lands where it is needed
            weight = tile(g_ptr + (columns + which * 0), columns, k, EVEN, "")
        if PDL:
            gdc_wait()
        x = tile(x_ptr + which * k + columns, columns, k, EVEN, "")
        if NORM:
            full = x.to(tl.float32)
            squares += tl.sum(full * full, axis=3)
            x = (full * (weight.to(tl.float32) + shift)).to(dtype)
        right = _right(x, ROWS, SPLIT, DEPTH)
        y = tl.dot(left(w, BLOCK, SPLIT, DEPTH).to(dtype), right, y)
        if GATE > 0:
            up = tl.dot(left(u, BLOCK, SPLIT, DEPTH).to(dtype), right, up)
    total = tl.sum(y, axis=0)
    more = total
    if GATE > 0:
        more = tl.sum(up, axis=0)
    here = block * BLOCK + tl.arange(0, BLOCK)
    inside = here < n
    row = tl.arange(0, ROWS)
    if NORM:
        factor = tl.rsqrt(tl.reshape(tl.trans(tl.sum(tl.sum(squares, axis=3), axis=1)), (ROWS,)) / k + eps)
        total = total * factor[None, :]
        more = more * factor[None, :]
    if SCALED:
        total = total * tl.load(s_ptr + here, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATE > 0:
            more = more * tl.load(s1 + here, mask=inside, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        total += tl.load(b_ptr + here, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATE > 0:
            more += tl.load(b1 + here, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATE > 0:
        total = activated(total, GATE) * more
    at = row[None, :] * n + here[:, None]
    stored = inside[:, None] & (row < rows)[None, :]
    if RESIDUAL:
        total += tl.load(r_ptr + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=stored)
