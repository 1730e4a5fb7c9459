"""The Triton programs behind `runtime/decode`. They read from top to bottom; each says what one program does."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _activated(x, GATE: tl.constexpr):  # noqa: ANN001, ANN202
    if GATE == 1:
        return x * tl.sigmoid(x)
    if GATE == 3:  # 0.5 * (1 + tanh(y)) is sigmoid(2 * y)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _weights(w_ptr, rows, inside, columns, width, NOTHING: tl.constexpr):  # noqa: ANN001, ANN202
    """A block of weights, or of words of them, as they are stored; nothing before it in the stream makes them."""
    return tl.load(
        w_ptr + rows[:, None].to(tl.int64) * width + columns[None, :],
        mask=inside[:, None] & (columns < width)[None, :],
        other=NOTHING,
        eviction_policy="evict_first",
    )


@triton.jit
def _unpacked(words, j: tl.constexpr, BITS: tl.constexpr):  # noqa: ANN001, ANN202
    """The j-th small integer q of every word as 1 + q / 2^BITS: its bits are the fraction of a float in [1, 2)."""
    shifted = ((words >> (j * BITS)) & ((1 << BITS) - 1)) << (23 - BITS)
    return (shifted | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _place(words, j: tl.constexpr, each: tl.constexpr):  # noqa: ANN001, ANN202
    """Which weight of its row the j-th integer of a word is: words in fours, so that four weights stand together."""
    return (words // 4) * (4 * each) + j * 4 + words % 4


@triton.jit
def _input(x_ptr, g_ptr, shift, at, there, NORM: tl.constexpr):  # noqa: ANN001, ANN202
    """Elements of x times the norm's weight, and their squares before it."""
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    squares = x * x
    if NORM:
        x = x * (tl.load(g_ptr + at, mask=there, other=0.0).to(tl.float32) + shift)
    return x, squares


@triton.jit
def _dot_row(
    x_ptr,
    g_ptr,
    shift,
    w_ptr,
    s_ptr,
    rows,
    inside,
    k,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):  # noqa: ANN001, ANN202, E501
    """One row of x times a block of rows of w, and the sum of x's squares."""
    many = tl.zeros((BLOCK, DEPTH), tl.float32)
    squares = tl.zeros((DEPTH,), tl.float32)
    for start in range(0, k, DEPTH):
        columns = start + tl.arange(0, DEPTH)
        w = _weights(w_ptr, rows, inside, columns, k, 0.0)
        if PDL:
            gdc_wait()
        x, square = _input(x_ptr, g_ptr, shift, columns, columns < k, NORM)
        squares += square
        many += w.to(tl.float32) * x[None, :]
    total = tl.sum(many, axis=1)
    if SCALED:
        total = total * tl.load(s_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    return total, tl.sum(squares, axis=0)


@triton.jit
def _finish(y, up, b_ptr, b1, r_ptr, y_ptr, here, inside, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr):  # noqa: ANN001, ANN202, E501  # fmt: skip
    """A block of outputs of one row, with all that comes after the product; `up` counts only where there is a gate."""
    if BIAS:
        y += tl.load(b_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if GATE > 0:
        if BIAS:
            up += tl.load(b1 + here, mask=inside, other=0.0).to(tl.float32)
        y = _activated(y, GATE) * up
    if RESIDUAL:
        y += tl.load(r_ptr + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + here, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def one_row(
    x_ptr,
    g_ptr,
    r_ptr,
    w0,
    w1,
    w2,
    s0,
    s1,
    s2,
    b0,
    b1,
    b2,
    y0,
    y1,
    y2,
    n0,
    n1,
    n2,
    second,
    third,
    k,
    eps,
    shift,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):  # noqa: ANN001, ANN201, E501
    """A block of one weight's outputs for the only row of x; `second` and `third` are where other weights begin."""
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    w_ptr, s_ptr, b_ptr, y_ptr, n, block = w0, s0, b0, y0, n0, pid
    if pid >= third:
        w_ptr, s_ptr, b_ptr, y_ptr, n, block = w2, s2, b2, y2, n2, pid - third
    elif pid >= second:
        w_ptr, s_ptr, b_ptr, y_ptr, n, block = w1, s1, b1, y1, n1, pid - second
    here = block * BLOCK + tl.arange(0, BLOCK)
    inside = here < n
    y, squares = _dot_row(x_ptr, g_ptr, shift, w_ptr, s_ptr, here, inside, k, NORM, SCALED, BLOCK, DEPTH, PDL)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(squares / k + eps)
    up = y
    if GATE > 0:
        up, _ = _dot_row(x_ptr, g_ptr, shift, w1, s1, here, inside, k, NORM, SCALED, BLOCK, DEPTH, False)
    _finish(y * factor, up * factor, b_ptr, b1, r_ptr, y_ptr, here, inside, RESIDUAL, BIAS, GATE)


@triton.jit
def _inputs(x_ptr, g_ptr, shift, which, rows, columns, k, NORM: tl.constexpr):  # noqa: ANN001, ANN202
    """Some columns of all rows of x, times the norm's weight, and the sums of their squares before it."""
    there = (which < rows)[None, :] & (columns < k)[:, None]
    x = tl.load(x_ptr + which[None, :] * k + columns[:, None], mask=there, other=0.0)
    squares = tl.zeros((16,), tl.float32)
    if NORM:
        full = x.to(tl.float32)
        squares = tl.sum(full * full, axis=0)
        weight = tl.load(g_ptr + columns, mask=columns < k, other=0.0).to(tl.float32) + shift
        x = (full * weight[:, None]).to(x.dtype)
    return x, squares


@triton.jit
def _dot_rows(
    x_ptr,
    g_ptr,
    shift,
    w_ptr,
    s_ptr,
    here,
    inside,
    rows,
    k,
    width,
    NORM: tl.constexpr,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):  # noqa: ANN001, ANN202, E501
    """Up to sixteen rows of x times a block of rows of w, and the sums of the rows' squares."""
    which = tl.arange(0, 16)
    total = tl.zeros((BLOCK, 16), tl.float32)
    squares = tl.zeros((16,), tl.float32)
    dtype = x_ptr.dtype.element_ty
    if BITS > 0:
        each: tl.constexpr = 32 // BITS
        for start in range(0, width, GROUP // each):
            columns = start + tl.arange(0, GROUP // each)
            words = _weights(w_ptr, here, inside, columns, width, 0)
            products = tl.zeros((BLOCK, 16), tl.float32)
            for j in tl.static_range(each):
                x, square = _inputs(x_ptr, g_ptr, shift, which, rows, _place(columns, j, each), k, NORM)
                squares += square
                w = (_unpacked(words, j, BITS) - 1.5) * (1 << BITS)
                products = tl.dot(w.to(dtype), x, products)
            scale = tl.load(s_ptr + here * (k // GROUP) + start * each // GROUP, mask=inside, other=0.0)
            total += products * scale.to(tl.float32)[:, None]
    else:
        for start in range(0, k, DEPTH):
            columns = start + tl.arange(0, DEPTH)
            w = _weights(w_ptr, here, inside, columns, k, 0.0)
            x, square = _inputs(x_ptr, g_ptr, shift, which, rows, columns, k, NORM)
            squares += square
            total = tl.dot(w.to(dtype), x, total)
    if SCALED:
        total = total * tl.load(s_ptr + here, mask=inside, other=0.0).to(tl.float32)[:, None]
    return total, squares


@triton.jit
def few_rows(
    x_ptr,
    g_ptr,
    r_ptr,
    w0,
    w1,
    w2,
    s0,
    s1,
    s2,
    b0,
    b1,
    b2,
    y0,
    y1,
    y2,
    n0,
    n1,
    n2,
    second,
    third,
    rows,
    k,
    width,
    eps,
    shift,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):  # noqa: ANN001, ANN201, E501
    """A block of one weight's outputs for up to sixteen rows of x."""
    pid = tl.program_id(0)
    w_ptr, s_ptr, b_ptr, y_ptr, n, block = w0, s0, b0, y0, n0, pid
    if pid >= third:
        w_ptr, s_ptr, b_ptr, y_ptr, n, block = w2, s2, b2, y2, n2, pid - third
    elif pid >= second:
        w_ptr, s_ptr, b_ptr, y_ptr, n, block = w1, s1, b1, y1, n1, pid - second
    here = block * BLOCK + tl.arange(0, BLOCK)
    inside = here < n
    which = tl.arange(0, 16)
    y, squares = _dot_rows(
        x_ptr, g_ptr, shift, w_ptr, s_ptr, here, inside, rows, k, width, NORM, BITS, SCALED, GROUP, BLOCK, DEPTH
    )
    factor = tl.rsqrt(squares / k + eps) if NORM else tl.full((16,), 1.0, tl.float32)
    y = y * factor[None, :]
    if BIAS:
        y += tl.load(b_ptr + here, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATE > 0:
        up, _ = _dot_rows(
            x_ptr, g_ptr, shift, w1, s1, here, inside, rows, k, width, NORM, BITS, SCALED, GROUP, BLOCK, DEPTH
        )
        up = up * factor[None, :]
        if BIAS:
            up += tl.load(b1 + here, mask=inside, other=0.0).to(tl.float32)[:, None]
        y = _activated(y, GATE) * up
    at = which[None, :] * n + here[:, None]
    stored = inside[:, None] & (which < rows)[None, :]
    if RESIDUAL:
        y += tl.load(r_ptr + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _heads(
    source,
    norm,
    cosine,
    sine,
    along,
    there,
    eps,
    shift,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
):  # noqa: ANN001, ANN202
    """Heads, a row each, normalised and turned; `source` is where they begin, a column."""
    given = tl.load(source + along[None, :], mask=there, other=0.0)
    x = given.to(tl.float32)
    factor = tl.full((1, 1), 1.0, tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD + eps)[:, None]
        x = x * factor * (tl.load(norm + along).to(tl.float32) + shift)[None, :]
    if TURN:
        across = (along + HALF) % HEAD
        other = tl.load(source + across[None, :], mask=there, other=0.0).to(tl.float32)
        if NORM:
            other = other * factor * (tl.load(norm + across).to(tl.float32) + shift)[None, :]
        other = tl.where((along < HALF)[None, :], -other, other)
        x = x * tl.load(cosine + along).to(tl.float32)[None, :] + other * tl.load(sine + along).to(tl.float32)[None, :]
    return x.to(given.dtype)


@triton.jit
def write(
    cache,
    new,
    positions,
    norm,
    cosine,
    sine,
    heads,
    cb,
    ch,
    cl,
    nb,
    nh,
    tc,
    ts,
    eps,
    shift,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
    PDL: tl.constexpr,
):  # noqa: ANN001, ANN201, E501
    """One head's new row, normalised and turned, at its position in the cache."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    along = tl.arange(0, HEAD)
    one = tl.arange(0, 1)[:, None]
    source = new + b * nb + head * nh + one
    x = _heads(source, norm, cosine + b * tc, sine + b * ts, along, one == 0, eps, shift, HEAD, HALF, NORM, TURN)
    at = tl.load(positions)
    tl.store(cache + b * cb + head * ch + at * cl + one + along[None, :], x)


@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    positions,
    mask,
    norm,
    cosine,
    sine,
    sums,
    tops,
    heads,
    groups,
    length,
    span,
    scale,
    qb,
    qh,
    kb,
    kh,
    kl,
    vb,
    vh,
    vl,
    mb,
    mh,
    ml,
    tc,
    ts,
    eps,
    shift,
    parts,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    SHARE: tl.constexpr,
    STEP: tl.constexpr,
    LIMIT: tl.constexpr,
    MASK: tl.constexpr,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
    PDL: tl.constexpr,
):  # noqa: ANN001, ANN201, E501
    """The query heads that share one key head, over one span of the cache: unnormalised sums, maxima and weights."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    part = tl.program_id(1)
    share = heads // groups
    each = tl.arange(0, SHARE)
    along = tl.arange(0, HEAD)
    mine = each < share
    head = group * share + each
    at = q_ptr + b * qb + head[:, None] * qh
    q = _heads(at, norm, cosine + b * tc, sine + b * ts, along, mine[:, None], eps, shift, HEAD, HALF, NORM, TURN)
    end = length
    if LIMIT:
        end = tl.minimum(tl.load(positions).to(tl.int32) + 1, length)
    first = part * span
    last = tl.minimum(first + span, end)
    top = tl.full((SHARE,), float("-inf"), tl.float32)
    weight = tl.zeros((SHARE,), tl.float32)
    total = tl.zeros((SHARE, HEAD), tl.float32)
    for start in range(first, last, STEP):
        keys = start + tl.arange(0, STEP)
        there = keys < last
        wanted = there
        if MASK > 0:
            place = mask + b * mb + head[:, None] * mh + keys[None, :] * ml
            seen = tl.load(place, mask=mine[:, None] & there[None, :], other=0)
            if MASK == 1:  # what no head may see is not read
                wanted = there & (tl.max((seen != 0).to(tl.int32), axis=0) > 0)
        k = tl.load(
            k_ptr + b * kb + group * kh + keys[None, :].to(tl.int64) * kl + along[:, None],
            mask=wanted[None, :],
            other=0.0,
        )
        v = tl.load(
            v_ptr + b * vb + group * vh + keys[:, None].to(tl.int64) * vl + along[None, :],
            mask=wanted[:, None],
            other=0.0,
        )
        score = tl.dot(q, k) * scale
        if MASK == 1:
            score = tl.where(seen != 0, score, float("-inf"))
        elif MASK == 2:
            score += seen.to(tl.float32)
        score = tl.where(there[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp(top - base)
        p = tl.exp(score - base[:, None])
        weight = weight * factor + tl.sum(p, axis=1)
        total = total * factor[:, None] + tl.dot(p.to(v.dtype), v)
        top = higher
    row = b * heads + head
    into = row * parts + part
    tl.store(sums + into[:, None] * HEAD + along[None, :], total, mask=mine[:, None])
    tl.store(tops + into, top, mask=mine)
    tl.store(tops + tl.num_programs(0) // groups * heads * parts + into, weight, mask=mine)


@triton.jit
def combine(sums, tops, out, rows, parts, HEAD: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):  # noqa: ANN001, ANN201
    """One head's parts as one: each counts for its share of the whole."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    each = tl.arange(0, PARTS)
    along = tl.arange(0, HEAD)
    there = each < parts
    top = tl.load(tops + row * parts + each, mask=there, other=float("-inf"))
    weight = tl.load(tops + rows * parts + row * parts + each, mask=there, other=0.0)
    highest = tl.max(top, axis=0)
    factor = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    part = tl.load(sums + (row * parts + each)[:, None] * HEAD + along[None, :], mask=there[:, None], other=0.0)
    total = tl.sum(part * factor[:, None], axis=0) / tl.sum(weight * factor, axis=0)
    tl.store(out + row * HEAD + along, total.to(out.dtype.element_ty))
