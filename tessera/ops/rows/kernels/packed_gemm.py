"""Packed GEMM: few rows of x and weights of small integers, on the matrix units' integer side.

A program has sixteen outputs or a few times that; its warps share the columns, group by group. Weights lie in memory as
the matrix unit wants them in registers (`ops/quantized` packs them): 16 bytes a thread, nothing moves between threads.
They are asked for before the kernel waits for the one before it. Four bits become eight by one or two instructions for
every four. x becomes, group by group, whole numbers of 16 bits in two halves, whose products with the weights are added
up without any rounding and scaled at the end: x loses 2^-16 of the largest value of its group.

On an H200 a token of a 552 M Llama (batch 1, context 1024) takes 208 µs so; 238 µs where integers became bf16 in
registers and x was bf16; 264 µs where kernels also had the weights of later ones brought to the cache; 452 µs where
programs walked over blocks of words copied ahead of them and multiplied without matrix units. bf16 takes 377 µs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tessera.ops.rows.kernels.gemv import activated, of_program


@triton.jit
def _nibbles(packed, ASM: tl.constexpr):
    """Bytes of two whole numbers from -8 to 7 -> those in the low bits and those in the high ones, times 16."""
    if ASM:
        shift: tl.constexpr = "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }"
        mask: tl.constexpr = "and.b32 $0, $1, 0xF0F0F0F0;"
        low = tl.inline_asm_elementwise(shift, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(mask, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
    else:
        low, high = packed << 4, (packed >> 4) << 4
    return low, high


@triton.jit
def _bytes(whole, ASM: tl.constexpr):
    """The low eight bits of words, four together."""
    if ASM:  # not pure, or the compiler would have all of x's arithmetic done by all who want the result
        take: tl.constexpr = (
            "{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x0040; prmt.b32 b, $3, $4, 0x0040; prmt.b32 $0, a, b, 0x5410; }"  # noqa: E501
        )
        packed = tl.inline_asm_elementwise(take, "=r,r,r,r,r", [whole], dtype=tl.int8, is_pure=False, pack=4)
    else:
        packed = whole.to(tl.int8)
    return packed


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, ASM: tl.constexpr):
    """Of every group, and no number if one of it is none."""
    if ASM:
        top = tl.reduce(tl.abs(x), 2, _larger)
    else:  # in Triton's interpreter such a function is slow
        top = tl.max(tl.abs(x), 2) + 0.0 * tl.sum(x, 2)
    return tl.maximum(top, 1e-30, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _whole(x, STEP: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """Rows of x -> the high and the low halves of whole numbers, and what one is worth (groups, rows).

    The largest of a group becomes 127 * 256, so that its high half fits. Added to 1.5 * 2^23, a small float ends in the
    nearest whole number.
    """
    x = tl.reshape(x, (ROWS, STEP, 128))
    top = _largest(x, ASM)
    bits = (x * (32512.0 / top)[:, :, None] + 12582912.0).to(tl.int32, bitcast=True)
    high, low = _bytes((bits + 128) >> 8, ASM), _bytes(bits, ASM)  # a * 256 + b, both from -128 to 127
    return _columns(high, STEP, ROWS), _columns(low, STEP, ROWS), tl.permute(top * (1.0 / 32512.0), (1, 0))


@triton.jit
def _columns(x, STEP: tl.constexpr, ROWS: tl.constexpr):
    """(rows, groups, 128) -> (groups, 128, rows); one row twice: Triton 3.6 adds up single columns wrongly."""
    x = tl.permute(x, (1, 2, 0))
    if ROWS == 1:
        x = tl.broadcast_to(x, (STEP, 128, 2))
    return x


@triton.jit
def _piece(w_ptr, block, valid, group, groups, i: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr):  # noqa: E501
    """One piece of some groups of blocks of sixteen rows, 512 bytes each: (groups, blocks, 512)."""
    start = (block.to(tl.int64) * groups)[None, :] + group[:, None]
    at = w_ptr + (start * (BITS * 256) + i * 512)[:, :, None] + tl.arange(0, 512)[None, None, :]
    if EVEN:
        loaded = tl.load(at, eviction_policy="evict_first")
    else:
        wanted = valid[None, :] & (group < groups)[:, None]
        loaded = tl.load(at, mask=wanted[:, :, None], other=0, eviction_policy="evict_first")
    return loaded


@triton.jit
def _pieces(w_ptr, block, valid, group, groups, BITS: tl.constexpr, EVEN: tl.constexpr):
    p0 = _piece(w_ptr, block, valid, group, groups, 0, BITS, EVEN)
    p1 = _piece(w_ptr, block, valid, group, groups, 1, BITS, EVEN)
    p2, p3 = p0, p1
    if BITS == 8:
        p2 = _piece(w_ptr, block, valid, group, groups, 2, BITS, EVEN)
        p3 = _piece(w_ptr, block, valid, group, groups, 3, BITS, EVEN)
    return p0, p1, p2, p3


@triton.jit
def _ordered(piece, STEP: tl.constexpr, TILES: tl.constexpr):
    """A piece as it lies in memory -> (groups, rows, 32)."""
    piece = tl.permute(tl.reshape(piece, (STEP, TILES, 8, 4, 2, 8)), (0, 1, 4, 2, 3, 5))
    return tl.reshape(piece, (STEP, TILES * 16, 32))


@triton.jit
def _matrix(p0, p1, p2, p3, BITS: tl.constexpr, STEP: tl.constexpr, TILES: tl.constexpr, ASM: tl.constexpr):  # noqa: E501
    """Pieces -> (groups, rows, 128), the columns in their own order; four bits come out times 16."""
    w0, w1 = _ordered(p0, STEP, TILES), _ordered(p1, STEP, TILES)
    if BITS == 4:
        low0, high0 = _nibbles(w0, ASM)
        low1, high1 = _nibbles(w1, ASM)
        w = tl.join(tl.join(low0, high0), tl.join(low1, high1))
    else:
        w2, w3 = _ordered(p2, STEP, TILES), _ordered(p3, STEP, TILES)
        w = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.permute(w, (0, 1, 3, 4, 2)), (STEP, TILES * 16, 128))


@triton.jit
def _scales(s_ptr, row, inside, group, groups, EVEN: tl.constexpr):
    at = s_ptr + row[None, :] * groups + group[:, None]
    if EVEN:
        scale = tl.load(at)
    else:
        scale = tl.load(at, mask=inside[None, :] & (group < groups)[:, None], other=0.0)
    return scale.to(tl.float32)


@triton.jit
def _within(columns, k, EVEN: tl.constexpr):
    """Where there are columns of x: everywhere, if steps and tiles come out even."""
    return columns >= 0 if EVEN else columns < k


@triton.jit
def _gains(g_ptr, shift, columns, k, NORM: tl.constexpr, EVEN: tl.constexpr):
    gain = shift
    if NORM:
        gain = tl.load(g_ptr + columns, mask=_within(columns, k, EVEN), other=0.0).to(tl.float32) + shift
    return gain


@triton.jit
def _dot(
    x_ptr, gain, columns, k, rows, p0, p1, p2, p3, scale, y, squares, NORM: tl.constexpr, BITS: tl.constexpr,
    STEP: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Some columns of x times those of a weight, added to what came before; and the squares of x."""
    which = tl.arange(0, ROWS)
    valid = (which < rows)[:, None] & _within(columns, k, EVEN)[None, :]
    x = tl.load(x_ptr + which[:, None] * k + columns[None, :], mask=valid, other=0.0).to(tl.float32)
    if NORM:
        squares += x * x
        x = x * gain[None, :]
    high, low, worth = _whole(x, STEP, ROWS, ASM)
    w = _matrix(p0, p1, p2, p3, BITS, STEP, TILES, ASM)
    products = tl.dot(w, low, tl.dot(w, high, out_dtype=tl.int32) << 8, out_dtype=tl.int32)
    if ROWS == 1:
        products, _ = tl.split(products)
        products = products[:, :, None]
    return y + products.to(tl.float32) * scale[:, :, None] * worth[:, None, :], squares


@triton.jit
def packed_gemm(
    x_ptr, g_ptr, r_ptr, w0, w1, w2, s0, s1, s2, b0, b1, b2, y0, y1, y2, n0, n1, n2, second, third, rows, k, eps, shift,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, STEP: tl.constexpr, TILES: tl.constexpr, MORE: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TILES times sixteen of one weight's outputs for up to ROWS rows, or half as many of two weights, gated."""
    if PDL:
        gdc_launch_dependents()
    w_ptr, s_ptr, b_ptr, y_ptr, n, first = of_program(
        tl.program_id(0), second, third, w0, w1, w2, s0, s1, s2, b0, b1, b2, y0, y1, y2, n0, n1, n2
    )
    EACH: tl.constexpr = TILES // 2 if GATE > 0 else TILES  # tiles of a weight
    groups = k // GROUP
    group = tl.arange(0, STEP)
    columns = tl.arange(0, STEP * GROUP)
    tile = tl.arange(0, TILES)
    block = first * EACH + tile % EACH
    line = tl.arange(0, TILES * 16)
    row = first * (EACH * 16) + line % (EACH * 16)
    if GATE > 0:
        w_from = tl.multiple_of(tl.where(tile < EACH, w_ptr, w1), 16)[None, :, None]
        s_from = tl.where(line < EACH * 16, s_ptr, s1)[None, :]
    else:
        w_from, s_from = w_ptr, s_ptr
    p0, p1, p2, p3 = _pieces(w_from, block, block * 16 < n, group, groups, BITS, EVEN)
    gain = _gains(g_ptr, shift, columns, k, NORM, EVEN)
    scale = _scales(s_from, row, row < n, group, groups, EVEN)
    if PDL:
        gdc_wait()
    here = first * (EACH * 16) + tl.arange(0, EACH * 16)
    inside = here < n
    which = tl.arange(0, ROWS)
    at = which[None, :] * n + here[:, None]
    stored = inside[:, None] & (which < rows)[None, :]
    residual = 0.0
    if RESIDUAL:
        residual = tl.load(r_ptr + at, mask=stored, other=0.0).to(tl.float32)
    y = tl.zeros((STEP, TILES * 16, ROWS), tl.float32)
    squares = tl.zeros((ROWS, STEP * GROUP), tl.float32)
    y, squares = _dot(x_ptr, gain, columns, k, rows, p0, p1, p2, p3, scale, y, squares, NORM, BITS, STEP, TILES, EVEN, ROWS, ASM)  # noqa: E501  # fmt: skip
    if MORE:
        for start in tl.range(STEP, groups, STEP, num_stages=1):
            p0, p1, p2, p3 = _pieces(w_from, block, block * 16 < n, start + group, groups, BITS, EVEN)
            gain = _gains(g_ptr, shift, start * GROUP + columns, k, NORM, EVEN)
            scale = _scales(s_from, row, row < n, start + group, groups, EVEN)
            y, squares = _dot(x_ptr, gain, start * GROUP + columns, k, rows, p0, p1, p2, p3, scale, y, squares, NORM, BITS, STEP, TILES, EVEN, ROWS, ASM)  # noqa: E501  # fmt: skip
    out = tl.sum(y, axis=0) * (0.0625 if BITS == 4 else 1.0)
    if NORM:
        out = out * tl.rsqrt(tl.sum(squares, axis=1) / k + eps)[None, :]
    if GATE > 0:
        out, up = tl.split(tl.permute(tl.reshape(out, (2, EACH * 16, ROWS)), (1, 2, 0)))
    if BIAS:
        out += tl.load(b_ptr + here, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATE > 0:
        if BIAS:
            up += tl.load(b1 + here, mask=inside, other=0.0).to(tl.float32)[:, None]
        out = activated(out, GATE) * up
    if RESIDUAL:
        out += residual
    tl.store(y_ptr + at, out.to(y_ptr.dtype.element_ty), mask=stored)
