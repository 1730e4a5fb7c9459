"""GEMV: one row of x, weights read along their rows and multiplied without matrix units; and what its likes share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def activated(x, GATE: tl.constexpr):
    if GATE == 1:
        return x * tl.sigmoid(x)
    if GATE == 3:  # 0.5 * (1 + tanh(y)) is sigmoid(2 * y)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _dot_row(
    x_ptr, g_ptr, shift, w_ptr, s_ptr, rows, inside, k,
    NORM: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of x times a block of rows of w, and the sum of x's squares. Weights are asked for before the wait, since
    nothing before it in the stream makes them."""
    many = tl.zeros((BLOCK, DEPTH), tl.float32)
    squares = tl.zeros((DEPTH,), tl.float32)
    for start in range(0, k, DEPTH):
        columns = start + tl.arange(0, DEPTH)
        at = w_ptr + rows[:, None].to(tl.int64) * k + columns[None, :]
        valid = columns < k
        w = tl.load(at, mask=inside[:, None] & valid[None, :], other=0.0, eviction_policy="evict_first")
        if PDL:
            gdc_wait()
        x = tl.load(x_ptr + columns, mask=valid, other=0.0).to(tl.float32)
        squares += x * x
        if NORM:
            x = x * (tl.load(g_ptr + columns, mask=valid, other=0.0).to(tl.float32) + shift)
        many += w.to(tl.float32) * x[None, :]
    total = tl.sum(many, axis=1)
    if SCALED:
        total = total * tl.load(s_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    return total, tl.sum(squares, axis=0)


@triton.jit
def of_program(pid, second, third, w0, w1, w2, s0, s1, s2, b0, b1, b2, y0, y1, y2, n0, n1, n2):
    """The weight that a program has a block of, with its scales, bias, result and size, and which block; `second` and
    `third` are where other weights begin."""
    w_ptr, s_ptr, b_ptr, y_ptr, n, block = w0, s0, b0, y0, n0, pid
    if pid >= third:
        w_ptr, s_ptr, b_ptr, y_ptr, n, block = w2, s2, b2, y2, n2, pid - third
    elif pid >= second:
        w_ptr, s_ptr, b_ptr, y_ptr, n, block = w1, s1, b1, y1, n1, pid - second
    return w_ptr, s_ptr, b_ptr, y_ptr, n, block


@triton.jit
def gemv(
    x_ptr, g_ptr, r_ptr, w0, w1, w2, s0, s1, s2, b0, b1, b2, y0, y1, y2, n0, n1, n2, second, third, k, eps, shift,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of one weight's outputs for the only row of x."""
    if PDL:
        gdc_launch_dependents()
    w_ptr, s_ptr, b_ptr, y_ptr, n, block = of_program(
        tl.program_id(0), second, third, w0, w1, w2, s0, s1, s2, b0, b1, b2, y0, y1, y2, n0, n1, n2
    )
    here = block * BLOCK + tl.arange(0, BLOCK)
    inside = here < n
    y, squares = _dot_row(x_ptr, g_ptr, shift, w_ptr, s_ptr, here, inside, k, NORM, SCALED, BLOCK, DEPTH, PDL)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(squares / k + eps)
    up = y
    if GATE > 0:
        up, _ = _dot_row(x_ptr, g_ptr, shift, w1, s1, here, inside, k, NORM, SCALED, BLOCK, DEPTH, False)
    y, up = y * factor, up * factor
    if BIAS:
        y += tl.load(b_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if GATE > 0:
        if BIAS:
            up += tl.load(b1 + here, mask=inside, other=0.0).to(tl.float32)
        y = activated(y, GATE) * up
    if RESIDUAL:
        y += tl.load(r_ptr + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + here, y.to(y_ptr.dtype.element_ty), mask=inside)
