"""The Triton program for one row of x and weights of small integers, several to a word.

There is so little to read that the arithmetic counts: x is loaded and normalised once, a program then walks many
blocks of weights, whose words come ahead of it into shared memory; an integer becomes a float by three instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tessera.runtime.decode_kernels import _finish, _input, _place, _unpacked, _weights


@triton.jit
def _packed_dot(w_ptr, s_ptr, here, inside, columns, width, groups, x0, x1, x2, x3, x4, x5, x6, x7, total, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # noqa: ANN001, ANN202, E501  # fmt: skip
    """A block of rows of w times x, whose `total` is the sum of x over each word."""
    each: tl.constexpr = 32 // BITS
    words = _weights(w_ptr, here, inside, columns, width, 0)
    fours = tl.arange(0, STEPS // 4)
    scale = tl.load(
        s_ptr + here[:, None] * groups + (fours * 4 * each // GROUP)[None, :],
        mask=inside[:, None] & (fours * 4 < width)[None, :],
        other=0.0,
    ).to(tl.float32)
    products = _unpacked(words, 0, BITS) * x0[None, :] - 1.5 * total[None, :]  # 1 + q / 2^BITS - 1.5 is what is meant
    products += _unpacked(words, 1, BITS) * x1[None, :]
    products += _unpacked(words, 2, BITS) * x2[None, :]
    products += _unpacked(words, 3, BITS) * x3[None, :]
    if each == 8:
        products += _unpacked(words, 4, BITS) * x4[None, :]
        products += _unpacked(words, 5, BITS) * x5[None, :]
        products += _unpacked(words, 6, BITS) * x6[None, :]
        products += _unpacked(words, 7, BITS) * x7[None, :]
    parts = tl.sum(tl.reshape(products, (BLOCK, STEPS // 4, 4)), axis=2)  # four words of a thread have one scale
    return tl.sum(parts * scale, axis=1) * (1 << BITS)


@triton.jit
def packed_row(x_ptr, g_ptr, r_ptr, w0, w1, w2, s0, s1, s2, b0, b1, b2, y0, y1, y2, n0, n1, n2, second, third, k, width, eps, shift, NORM: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):  # noqa: ANN001, ANN201, E501  # fmt: skip
    """Every so many blocks of one weight's outputs; `second` and `third` are the programs that begin other weights."""
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    w_ptr, s_ptr, b_ptr, y_ptr, n, first, beyond = w0, s0, b0, y0, n0, 0, second
    if pid >= third:
        w_ptr, s_ptr, b_ptr, y_ptr, n, first, beyond = w2, s2, b2, y2, n2, third, programs
    elif pid >= second:
        w_ptr, s_ptr, b_ptr, y_ptr, n, first, beyond = w1, s1, b1, y1, n1, second, third
    each: tl.constexpr = 32 // BITS
    columns = tl.arange(0, STEPS)
    there = columns < width
    if PDL:
        gdc_wait()
    x0, a0 = _input(x_ptr, g_ptr, shift, _place(columns, 0, each), there, NORM)
    x1, a1 = _input(x_ptr, g_ptr, shift, _place(columns, 1, each), there, NORM)
    x2, a2 = _input(x_ptr, g_ptr, shift, _place(columns, 2, each), there, NORM)
    x3, a3 = _input(x_ptr, g_ptr, shift, _place(columns, 3, each), there, NORM)
    x4, x5, x6, x7 = x0, x0, x0, x0
    total = x0 + x1 + x2 + x3
    squares = a0 + a1 + a2 + a3
    if each == 8:
        x4, a0 = _input(x_ptr, g_ptr, shift, _place(columns, 4, each), there, NORM)
        x5, a1 = _input(x_ptr, g_ptr, shift, _place(columns, 5, each), there, NORM)
        x6, a2 = _input(x_ptr, g_ptr, shift, _place(columns, 6, each), there, NORM)
        x7, a3 = _input(x_ptr, g_ptr, shift, _place(columns, 7, each), there, NORM)
        total += x4 + x5 + x6 + x7
        squares += a0 + a1 + a2 + a3
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / k + eps)
    groups = k // GROUP
    for block in tl.range(pid - first, tl.cdiv(n, BLOCK), beyond - first, num_stages=STAGES):
        here = block * BLOCK + tl.arange(0, BLOCK)
        inside = here < n
        y = _packed_dot(w_ptr, s_ptr, here, inside, columns, width, groups, x0, x1, x2, x3, x4, x5, x6, x7, total, BITS, GROUP, BLOCK, STEPS)  # noqa: E501  # fmt: skip
        up = y
        if GATE > 0:
            up = _packed_dot(w1, s1, here, inside, columns, width, groups, x0, x1, x2, x3, x4, x5, x6, x7, total, BITS, GROUP, BLOCK, STEPS)  # noqa: E501  # fmt: skip
        _finish(y * factor, up * factor, b_ptr, b1, r_ptr, y_ptr, here, inside, RESIDUAL, BIAS, GATE)
