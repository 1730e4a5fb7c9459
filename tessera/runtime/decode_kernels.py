"""The Triton programs behind `runtime/decode`. They read from top to bottom; each says what one program does."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activated(x, GATE: tl.constexpr):  # noqa: ANN001, ANN202
    if GATE == 1:
        return x * tl.sigmoid(x)
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _weights(w_ptr, rows, inside, columns, k, KIND: tl.constexpr):  # noqa: ANN001, ANN202
    """A block of weights as they are stored."""
    return tl.load(
        w_ptr + rows[:, None].to(tl.int64) * k + columns[None, :],
        mask=inside[:, None] & (columns[None, :] < k),
        other=0,
        eviction_policy="evict_first",
    )


@triton.jit
def _dot_row(
    x_ptr,
    g_ptr,
    w_ptr,
    s_ptr,
    rows,
    inside,
    k,
    NORM: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):  # noqa: ANN001, ANN202, E501
    """One row of x times a block of rows of w, and the sum of x's squares."""
    total = tl.zeros((BLOCK,), tl.float32)
    part: tl.constexpr = DEPTH // 2 if KIND == 2 else DEPTH
    squares = tl.zeros((part,), tl.float32)
    if KIND == 2:
        half = k // 2
        for start in range(0, half, part):
            columns = start + tl.arange(0, part)
            packed = _weights(w_ptr, rows, inside, columns, half, KIND)
            groups = start // GROUP + tl.arange(0, part // GROUP)
            for high in tl.static_range(2):
                here = columns + high * half
                x = tl.load(x_ptr + here, mask=columns < half, other=0.0).to(tl.float32)
                if NORM:
                    squares += x * x
                    x = x * tl.load(g_ptr + here, mask=columns < half, other=0.0).to(tl.float32)
                w = ((packed >> (4 * high)) & 15).to(tl.float32) - 8.0
                sums = tl.sum(tl.reshape(w * x[None, :], (BLOCK, part // GROUP, GROUP)), axis=2)
                scale = tl.load(
                    s_ptr + rows[:, None] * (k // GROUP) + (groups + high * (half // GROUP))[None, :],
                    mask=inside[:, None] & (groups < half // GROUP)[None, :],
                    other=0.0,
                ).to(tl.float32)
                total += tl.sum(sums * scale, axis=1)
    else:
        many = tl.zeros((BLOCK, DEPTH), tl.float32)
        for start in range(0, k, DEPTH):
            columns = start + tl.arange(0, DEPTH)
            w = _weights(w_ptr, rows, inside, columns, k, KIND)
            x = tl.load(x_ptr + columns, mask=columns < k, other=0.0).to(tl.float32)
            if NORM:
                squares += x * x
                x = x * tl.load(g_ptr + columns, mask=columns < k, other=0.0).to(tl.float32)
            many += w.to(tl.float32) * x[None, :]
        total = tl.sum(many, axis=1)
        if KIND == 1:
            total = total * tl.load(s_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    return total, tl.sum(squares, axis=0)


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
    rows,
    k,
    eps,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):  # noqa: ANN001, ANN201, E501
    """A block of one weight's outputs for the only row of x; `second` and `third` are where other weights begin."""
    pid = tl.program_id(0)
    w_ptr, s_ptr, b_ptr, y_ptr, n, block = w0, s0, b0, y0, n0, pid
    if pid >= third:
        w_ptr, s_ptr, b_ptr, y_ptr, n, block = w2, s2, b2, y2, n2, pid - third
    elif pid >= second:
        w_ptr, s_ptr, b_ptr, y_ptr, n, block = w1, s1, b1, y1, n1, pid - second
    here = block * BLOCK + tl.arange(0, BLOCK)
    inside = here < n
    y, squares = _dot_row(x_ptr, g_ptr, w_ptr, s_ptr, here, inside, k, NORM, KIND, GROUP, BLOCK, DEPTH)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(squares / k + eps)
    y = y * factor
    if BIAS:
        y += tl.load(b_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if GATE > 0:
        up, _ = _dot_row(x_ptr, g_ptr, w1, s1, here, inside, k, NORM, KIND, GROUP, BLOCK, DEPTH)
        up = up * factor
        if BIAS:
            up += tl.load(b1 + here, mask=inside, other=0.0).to(tl.float32)
        y = _activated(y, GATE) * up
    if RESIDUAL:
        y += tl.load(r_ptr + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + here, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dot_rows(
    x_ptr,
    g_ptr,
    w_ptr,
    s_ptr,
    here,
    inside,
    rows,
    k,
    NORM: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):  # noqa: ANN001, ANN202, E501
    """Up to sixteen rows of x times a block of rows of w, and the sums of the rows' squares."""
    which = tl.arange(0, 16)
    total = tl.zeros((BLOCK, 16), tl.float32)
    squares = tl.zeros((16,), tl.float32)
    dtype = x_ptr.dtype.element_ty
    if KIND == 2:
        half = k // 2
        for start in range(0, half, GROUP):
            columns = start + tl.arange(0, GROUP)
            packed = _weights(w_ptr, here, inside, columns, half, KIND)
            for high in tl.static_range(2):
                along = columns + high * half
                x = tl.load(x_ptr + which[None, :] * k + along[:, None], mask=(which < rows)[None, :], other=0.0)
                if NORM:
                    full = x.to(tl.float32)
                    squares += tl.sum(full * full, axis=0)
                    x = (full * tl.load(g_ptr + along).to(tl.float32)[:, None]).to(dtype)
                w = (((packed >> (4 * high)) & 15).to(tl.float32) - 8.0).to(dtype)
                scale = tl.load(s_ptr + here * (k // GROUP) + (start + high * half) // GROUP, mask=inside, other=0.0)
                total += tl.dot(w, x) * scale.to(tl.float32)[:, None]
    else:
        for start in range(0, k, DEPTH):
            columns = start + tl.arange(0, DEPTH)
            w = _weights(w_ptr, here, inside, columns, k, KIND)
            x = tl.load(
                x_ptr + which[None, :] * k + columns[:, None],
                mask=(which < rows)[None, :] & (columns < k)[:, None],
                other=0.0,
            )  # noqa: E501
            if NORM:
                full = x.to(tl.float32)
                squares += tl.sum(full * full, axis=0)
                x = (full * tl.load(g_ptr + columns, mask=columns < k, other=0.0).to(tl.float32)[:, None]).to(dtype)
            total = tl.dot(w.to(dtype), x, total)
        if KIND == 1:
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
    eps,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    KIND: tl.constexpr,
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
    y, squares = _dot_rows(x_ptr, g_ptr, w_ptr, s_ptr, here, inside, rows, k, NORM, KIND, GROUP, BLOCK, DEPTH)
    factor = tl.rsqrt(squares / k + eps) if NORM else tl.full((16,), 1.0, tl.float32)
    y = y * factor[None, :]
    if BIAS:
        y += tl.load(b_ptr + here, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATE > 0:
        up, _ = _dot_rows(x_ptr, g_ptr, w1, s1, here, inside, rows, k, NORM, KIND, GROUP, BLOCK, DEPTH)
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
def write(
    cache,
    new,
    positions,
    turn,
    heads,
    time,
    cb,
    ch,
    cl,
    nb,
    nh,
    nt,
    tc,
    tt,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    TURN: tl.constexpr,
):  # noqa: ANN001, ANN201, E501
    """One head's new row, turned, at its position in the cache."""
    pid = tl.program_id(0)
    t = pid % time
    head = (pid // time) % heads
    b = pid // (time * heads)
    along = tl.arange(0, HEAD)
    source = new + b * nb + head * nh + t * nt
    x = tl.load(source + along)
    if TURN:
        other = tl.load(source + (along + HALF) % HEAD).to(tl.float32)
        other = tl.where(along < HALF, -other, other)
        cosine = tl.load(turn + t * tt + along).to(tl.float32)
        sine = tl.load(turn + tc + t * tt + along).to(tl.float32)
        x = (x.to(tl.float32) * cosine + other * sine).to(x.dtype)
    at = tl.load(positions + t)
    tl.store(cache + b * cb + head * ch + at * cl + along, x)


@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    positions,
    mask,
    turn,
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
    parts,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    SHARE: tl.constexpr,
    STEP: tl.constexpr,
    LIMIT: tl.constexpr,
    MASK: tl.constexpr,
    TURN: tl.constexpr,
):  # noqa: ANN001, ANN201, E501
    """The query heads that share one key head, over one span of the cache: unnormalised sums, maxima and weights."""
    b = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    part = tl.program_id(1)
    share = heads // groups
    each = tl.arange(0, SHARE)
    along = tl.arange(0, HEAD)
    mine = each < share
    head = group * share + each
    at = q_ptr + b * qb + head[:, None] * qh
    q = tl.load(at + along[None, :], mask=mine[:, None], other=0.0)
    if TURN:
        other = tl.load(at + ((along + HALF) % HEAD)[None, :], mask=mine[:, None], other=0.0).to(tl.float32)
        other = tl.where((along < HALF)[None, :], -other, other)
        cosine = tl.load(turn + along).to(tl.float32)
        sine = tl.load(turn + tc + along).to(tl.float32)
        q = (q.to(tl.float32) * cosine[None, :] + other * sine[None, :]).to(q.dtype)
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
        k = tl.load(
            k_ptr + b * kb + group * kh + keys[None, :].to(tl.int64) * kl + along[:, None],
            mask=there[None, :],
            other=0.0,
        )  # noqa: E501
        v = tl.load(
            v_ptr + b * vb + group * vh + keys[:, None].to(tl.int64) * vl + along[None, :],
            mask=there[:, None],
            other=0.0,
        )  # noqa: E501
        score = tl.dot(q, k) * scale
        if MASK > 0:
            seen = tl.load(
                mask + b * mb + head[:, None] * mh + keys[None, :] * ml, mask=mine[:, None] & there[None, :], other=0
            )  # noqa: E501
            if MASK == 1:
                score = tl.where(seen != 0, score, float("-inf"))
            else:
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
    place = row * parts + part
    tl.store(sums + place[:, None] * HEAD + along[None, :], total, mask=mine[:, None])
    tl.store(tops + place, top, mask=mine)
    tl.store(tops + tl.num_programs(0) // groups * heads * parts + place, weight, mask=mine)


@triton.jit
def combine(sums, tops, out, rows, parts, HEAD: tl.constexpr, PARTS: tl.constexpr):  # noqa: ANN001, ANN201
    """One head's parts as one: each counts for its share of the whole."""
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
