"""Split-K attention of one query a head over a cache: the new row is written, keys and values are read once.

Every sequence has its place in the cache: `positions`, whose numbers stand `pb` apart, 0 where all have the same. As in
`skinny_gemm`, keys and values are loaded as memory wants and multiplied as they lie: keys are the rows of one
product, with the queries; the dimensions of the values, in an order of their own, those of another, with the weights.
Eight heads that share keys fill one matrix unit. A warp has keys of its own, and its own maximum, until the end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tessera.ops.rows.kernels.skinny_gemm import iota, left, tile

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _heads(
    source, norm, cosine, sine, along, mask, eps, shift,
    HEAD: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Heads, a row each, normalised and turned; `source` is where they begin, a column."""
    HALF: tl.constexpr = HEAD // 2
    loaded = tl.load(source + along[None, :], mask=mask, other=0.0)
    x = loaded.to(tl.float32)
    factor = tl.full((1, 1), 1.0, tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD + eps)[:, None]
        x = x * factor * (tl.load(norm + along).to(tl.float32) + shift)[None, :]
    if TURN:
        across = (along + HALF) % HEAD
        other = tl.load(source + across[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            other = other * factor * (tl.load(norm + across).to(tl.float32) + shift)[None, :]
        other = tl.where((along < HALF)[None, :], -other, other)
        x = x * tl.load(cosine + along).to(tl.float32)[None, :] + other * tl.load(sine + along).to(tl.float32)[None, :]
    return x.to(loaded.dtype)


@triton.jit
def _place(positions, b, pb, length):
    """The position of a sequence, and the row of the cache it means: an index may count from the end."""
    at = tl.load(positions + b * pb).to(tl.int32)
    return at, tl.where(at < 0, at + length, at)


@triton.jit
def write(
    cache, new, positions, norm, cosine, sine, heads, length, cb, ch, cl, nb, nh, pb, tc, ts, eps, shift,
    HEAD: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head's new row, normalised and turned, at its place in the cache."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    along = tl.arange(0, HEAD)
    one = tl.arange(0, 1)[:, None]
    source = new + b * nb + head * nh + one
    x = _heads(source, norm, cosine + b * tc, sine + b * ts, along, one == 0, eps, shift, HEAD, NORM, TURN)
    _, place = _place(positions, b, pb, length)
    if (place >= 0) & (place < length):
        tl.store(cache + b.to(tl.int64) * cb + head * ch + place.to(tl.int64) * cl + one + along[None, :], x)


@triton.jit
def _seen(mask, at, ml, valid, first, last, MASK: tl.constexpr):
    """The first key of a span that any head sees, and the one after the last; a mask of numbers hides none."""
    low, high = first, last
    if MASK == 1:
        low, high = last, first
        for start in range(first, last, 256):
            keys = start + tl.arange(0, 256)[None, :]
            inside = valid[:, None] & (keys < last)
            shown = (tl.load(mask + at[:, None] + keys * ml, mask=inside, other=0) != 0) & inside
            low = tl.minimum(low, tl.min(tl.where(shown, keys, last)))
            high = tl.maximum(high, tl.max(tl.where(shown, keys + 1, first)))
    return low, high


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, new_k, new_v, positions, mask, norm, cosine, sine, key_norm, key_cosine, key_sine,
    sums, tops, out, heads, groups, length, span, scale,
    qb, qh, kb, kh, kl, vb, vh, vl, nkb, nkh, nvb, nvh, mb, mh, ml, pb, tc, ts, ktc, kts,
    eps, shift, key_eps, key_shift, parts,
    HEAD: tl.constexpr, SHARE: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr, LIMIT: tl.constexpr,
    MASK: tl.constexpr, WRITE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, KEY_NORM: tl.constexpr,
    KEY_TURN: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The query heads that share one key head, over one span of the cache; the new key and value go into the cache.

    A warp has keys of its own until the end. Scores are kept times log2(e), so that exp2 makes weights of them.
    """
    scale = scale * LOG2E
    b = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    part = tl.program_id(1)
    k_base = k_ptr + b.to(tl.int64) * kb + group * kh
    v_base = v_ptr + b.to(tl.int64) * vb + group * vh
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    share = heads // groups
    each = tl.arange(0, SHARE)
    along = tl.arange(0, HEAD)
    mine = each < share
    head = group * share + each
    first = part * span
    last = tl.minimum(first + span, length)
    at, place = length, length
    if LIMIT or WRITE:
        at, place = _place(positions, b, pb, length)
    if LIMIT:
        last = tl.minimum(last, at if WRITE else at + 1)
    source = q_ptr + b * qb + head[:, None] * qh
    q = _heads(source, norm, cosine + b * tc, sine + b * ts, along, mine[:, None], eps, shift, HEAD, NORM, TURN)
    seen = b * mb + head * mh
    piece: tl.constexpr = 64 if HEAD > 64 else HEAD
    pieces: tl.constexpr = HEAD // piece
    # what the matrix units call `along`
    column = along // piece * piece + along % 8 * (piece // 8) + along % piece // 8
    top = tl.full((SPLIT, SHARE), float("-inf"), tl.float32)
    weight = tl.zeros((SPLIT, SHARE), tl.float32)
    total = tl.zeros((SPLIT, HEAD, SHARE), tl.float32)
    if WRITE:  # the new row, if it belongs to this span, is the first that one of the warps has seen
        owns = (place >= first) & (place < tl.minimum(first + span, length))
        one = tl.arange(0, 1)[:, None]
        key = _heads(
            new_k + b * nkb + group * nkh + one, key_norm, key_cosine + b * ktc, key_sine + b * kts,
            along, one == 0, key_eps, key_shift, HEAD, KEY_NORM, KEY_TURN,
        )  # fmt: skip
        value = tl.load(new_v + b * nvb + group * nvh + column)
        if owns:
            tl.store(k_base + place.to(tl.int64) * kl + one + along[None, :], key)
            tl.store(v_base + place.to(tl.int64) * vl + column, value)
        mark = tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1) * scale
        if MASK > 0:
            row = tl.minimum(tl.maximum(place, 0), length - 1)
            visible = tl.load(mask + seen + row * ml, mask=mine, other=0)
            mark = tl.where(visible != 0, mark, float("-inf")) if MASK == 1 else mark + visible.to(tl.float32) * LOG2E
        starts = (owns & (at >= 0) if LIMIT else owns) & (tl.arange(0, SPLIT)[:, None] == 0)
        top = tl.where(starts, mark[None, :], float("-inf"))
        weight = tl.where(top > float("-inf"), 1.0, 0.0)
        total = value.to(tl.float32)[None, :, None] * weight[:, None, :]
    low, high = _seen(mask, seen, ml, mine, first, last, MASK)
    if WRITE and not LIMIT:  # what is in the cache where the new row goes is never read
        low = tl.where(low == place, low + 1, low)
        high = tl.where(high == place + 1, place, high)

    turned = tl.permute(tl.reshape(q, (SHARE, HEAD // 32, 4, 2, 2, 2)), (1, 3, 4, 2, 5, 0))
    queries = tl.broadcast_to(tl.reshape(turned, (1, HEAD, SHARE)), (SPLIT, HEAD, SHARE))
    numbers = tl.arange(0, SPLIT)[:, None, None] * STEP + tl.arange(0, STEP)[None, :, None]
    ours = iota(SPLIT, 1) * STEP + iota(STEP // 8, 2) * 8 + iota(8, 0)
    many = iota(STEP // 4 * pieces, 3)
    theirs = iota(SPLIT, 2) * STEP + many // pieces // 2 * 8 + iota(4, 0) * 2 + many // pieces % 2
    inner = many % pieces * piece + iota(8, 1) * (piece // 8) + iota(piece // 8, 4)
    for start in range(low, high, SPLIT * STEP):
        own, other = tl.minimum(start + ours, high - 1), tl.minimum(start + theirs, high - 1)
        if WRITE and not LIMIT:
            other = tl.where(other == place, low, other)
        key_offsets = own.to(tl.int64) * kl + iota(HEAD // 32, 3) * 32 + iota(32, 4)
        value_offsets = other.to(tl.int64) * vl + inner
        k = tile(k_base + key_offsets, key_offsets, 0, True, "evict_first")
        v = tile(v_base + value_offsets, value_offsets, 0, True, "evict_first")
        keys = start + numbers
        score = tl.dot(left(k, STEP, SPLIT, HEAD), queries) * scale
        if MASK > 0:
            shown = tl.load(mask + seen[None, None, :] + keys * ml, mask=mine[None, None, :] & (keys < high), other=0)
            score = tl.where(shown != 0, score, float("-inf")) if MASK == 1 else score + shown.to(tl.float32) * LOG2E
        inside = keys < high
        if WRITE and not LIMIT:
            inside = inside & (keys != place)
        score = tl.where(inside, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp2(top - base)
        p = tl.exp2(score - base[:, None, :])
        weight = weight * factor + tl.sum(p, axis=1)
        v = tl.reshape(v, (4, 8, SPLIT, STEP // 16, 2, 2, pieces, piece // 16, 2))
        v = tl.reshape(tl.permute(v, (2, 6, 7, 8, 1, 3, 4, 0, 5)), (SPLIT, HEAD, STEP))
        total = tl.dot(v, p.to(v.dtype), total * factor[:, None, :])
        top = higher
    highest = tl.max(top, axis=0)
    factor = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest)[None, :])
    result = tl.sum(total * factor[:, None, :], axis=0)
    sum_of = tl.sum(weight * factor, axis=0)
    query = b * heads + head
    if ONE:
        normalised = result * (1.0 / tl.where(sum_of == 0.0, 1.0, sum_of))[None, :]  # zeros where nothing is seen
        tl.store(out + query[None, :] * HEAD + column[:, None], normalised.to(out.dtype.element_ty), mask=mine[None, :])
    else:
        into = query * parts + part
        tl.store(sums + into[None, :] * HEAD + column[:, None], result, mask=mine[None, :])
        tl.store(tops + into, highest, mask=mine)
        tl.store(tops + tl.num_programs(0) // groups * heads * parts + into, sum_of, mask=mine)


@triton.jit
def combine(sums, tops, out, rows, parts, HEAD: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    """One head's parts as one: each counts for its share of the whole. Maxima are times log2(e)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    each = tl.arange(0, PARTS)
    along = tl.arange(0, HEAD)
    valid = each < parts
    top = tl.load(tops + row * parts + each, mask=valid, other=float("-inf"))
    weight = tl.load(tops + rows * parts + row * parts + each, mask=valid, other=0.0)
    highest = tl.max(top, axis=0)
    factor = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    part = tl.load(sums + (row * parts + each)[:, None] * HEAD + along[None, :], mask=valid[:, None], other=0.0)
    sum_of = tl.sum(weight * factor, axis=0)
    total = tl.sum(part * factor[:, None], axis=0) / tl.where(sum_of == 0.0, 1.0, sum_of)
    tl.store(out + row * HEAD + along, total.to(out.dtype.element_ty))
