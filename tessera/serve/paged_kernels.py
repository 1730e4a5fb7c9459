"""Attention over pages on a GPU: Triton programs, and what launches them.

In: the tensors of `tessera::paged_attention`. Out: its result, without waiting for the device: plans are made from
shapes alone. A sequence with one new token is split along its length, so that one long sequence and many short ones
keep all multiprocessors busy, and a second program combines the parts. Where it is split depends on its own position,
never on who else is there. Sequences with several new tokens are walked in tiles of queries, and long ones are split
as well where tiles are few: 272 equal programs take twice the time of 264 where 264 run side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # keys at a time
SPLIT, MOST_PARTS = 256, 32  # keys a part has at least; longer sequences have longer parts
ROWS = 64  # queries times heads of a tile
WARPS, STAGES = 4, 2
# Of sequences with several: keys a part has at least, the most parts, and programs that are enough. That is eight times
# what runs side by side on 132 multiprocessors, so that the last ones of all cost an eighth at most.
MANY_SPLIT, MANY_PARTS, ENOUGH = 1024, 8, 2048


@triton.jit
def _capped(scores, softcap):
    turned = tl.exp(-2.0 * tl.abs(scores) / softcap)
    tanh = (1.0 - turned) / (1.0 + turned)
    return softcap * tl.where(scores < 0, -tanh, tanh)


@triton.jit
def _add(
    q, at, start, last, sums, weight, top, table, keys, values, page_k, slot_k, page_v, slot_v, scale, window, softcap,
    SIZE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """One tile of keys more. Without MASKED every row sees all of them. With ORDERED the matrix unit adds the weights
    too, in the order of its sums, and a row has eight of them that are equal."""
    where, d, dv = start + tl.arange(0, TILE), tl.arange(0, D), tl.arange(0, DV)
    inside = where < last if MASKED else where >= 0
    page = tl.load(table + where // SIZE, mask=inside, other=0).to(tl.int64)
    k_at = keys + (page * page_k + (where % SIZE) * slot_k)[None, :] + d[:, None]
    k = tl.load(k_at, mask=inside[None, :] & (d < HEAD)[:, None], other=0.0).to(q.dtype)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if SOFTCAP:
        scores = _capped(scores, softcap)
    scores *= 1.4426950408889634  # powers of 2 from here on
    if MASKED:
        seen = inside[None, :] & (where[None, :] <= at[:, None])
        if WINDOW:
            seen = seen & (where[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher  # a row that has seen nothing yet
    share = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(top - level)
    v_at = values + (page * page_v + (where % SIZE) * slot_v)[:, None] + dv[None, :]
    v = tl.load(v_at, mask=inside[:, None] & (dv < VALUE)[None, :], other=0.0).to(q.dtype)
    if ORDERED:
        ones = tl.full([TILE, 8], 1.0, q.dtype)
        weight = weight * shrink[:, None] + tl.dot(share.to(q.dtype), ones, input_precision="ieee")
    else:
        weight = weight * shrink + tl.sum(share, 1)
    sums = sums * shrink[:, None] + tl.dot(share.to(q.dtype), v, input_precision="ieee")
    return sums, weight, higher


@triton.jit
def _walk(
    q, at, first, whole, last, table, keys, values, page_k, slot_k, page_v, slot_v, scale, window, softcap,
    ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr,
    VALUE: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Rows of queries at positions `at` over the keys from `first` to `last`, of which every row sees those before
    `whole`: sums, their weight and the top score."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    if ORDERED:
        weight = tl.zeros([ROWS, 8], tl.float32)
    else:
        weight = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DV], tl.float32)
    for start in range(first, whole, TILE):
        sums, weight, top = _add(
            q, at, start, last, sums, weight, top, table, keys, values, page_k, slot_k, page_v, slot_v, scale, window,
            softcap, SIZE, TILE, HEAD, D, VALUE, DV, WINDOW, SOFTCAP, False, ORDERED,
        )  # fmt: skip
    for start in range(whole, last, TILE):
        sums, weight, top = _add(
            q, at, start, last, sums, weight, top, table, keys, values, page_k, slot_k, page_v, slot_v, scale, window,
            softcap, SIZE, TILE, HEAD, D, VALUE, DV, WINDOW, SOFTCAP, True, ORDERED,
        )  # fmt: skip
    if ORDERED:
        weight = tl.max(weight, 1)
    return sums, weight, top


@triton.jit
def _part(length, window, WINDOW: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr):
    """Where the last token of a sequence begins to look, and how many keys each part of the way has."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, length - window) // TILE * TILE
    each = tl.cdiv(tl.cdiv(length - begin, MOST), TILE) * TILE
    return begin, tl.maximum(each, SPLIT)


@triton.jit
def _keep(sums, tops, place, mine, total, weight, top, DV: tl.constexpr):
    """What one part of the keys gave to each row, for `combine` and `combine_many`."""
    tl.store(sums + place[:, None] * DV + tl.arange(0, DV)[None, :], total, mask=mine[:, None])
    tl.store(tops + place * 2, top, mask=mine)
    tl.store(tops + place * 2 + 1, weight, mask=mine)


@triton.jit
def attend_one(
    q, keys, values, tables, starts, positions, out, sums, tops, scale, window, softcap,
    token_q, head_q, page_k, slot_k, head_k, page_v, slot_v, head_v, columns, heads, parts,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr,
    D: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr, MOST: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """A part of one sequence that has one new token, for the heads that share keys."""
    sequence, kv, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) - token != 1:
        return
    length = (tl.load(positions + token) + 1).to(tl.int32)
    begin, each = _part(length, window, WINDOW, TILE, SPLIT, MOST)
    first = begin + part * each
    if first >= length:
        return
    row, d, dv = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, DV)
    mine = row < GROUP
    q_at = q + token * token_q + (kv * GROUP + row)[:, None] * head_q + d[None, :]
    given = tl.load(q_at, mask=mine[:, None] & (d < HEAD)[None, :], other=0.0)
    at = tl.zeros([ROWS], tl.int32) + (length - 1)
    total, weight, top = _walk(
        given, at, first, first, tl.minimum(first + each, length), tables + sequence * columns,
        keys + kv * head_k, values + kv * head_v, page_k, slot_k, page_v, slot_v, scale, window, softcap,
        ROWS, SIZE, TILE, HEAD, D, VALUE, DV, WINDOW, SOFTCAP, False,
    )  # fmt: skip
    if ONE:
        y_at = out + (token * heads + kv * GROUP + row)[:, None] * VALUE + dv[None, :]
        tl.store(y_at, total / weight[:, None], mask=mine[:, None] & (dv < VALUE)[None, :])
    else:
        place = (sequence.to(tl.int64) * heads + kv * GROUP + row) * parts + part
        _keep(sums, tops, place, mine, total, weight, top, DV)


@triton.jit
def combine(
    sums, tops, starts, positions, out, window, heads, parts,
    TILE: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """The parts of one sequence and head, put together."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) - token != 1:
        return
    length = (tl.load(positions + token) + 1).to(tl.int32)
    begin, each = _part(length, window, WINDOW, TILE, SPLIT, MOST)
    part, dv = tl.arange(0, MOST), tl.arange(0, DV)
    there = part < tl.cdiv(length - begin, each)
    place = (sequence.to(tl.int64) * heads + head) * parts + part
    top = tl.load(tops + place * 2, mask=there, other=float("-inf"))
    weight = tl.load(tops + place * 2 + 1, mask=there, other=0.0)
    share = tl.exp2(top - tl.max(top, 0))
    total = tl.load(sums + place[:, None] * DV + dv[None, :], mask=there[:, None], other=0.0)
    y = tl.sum(total * share[:, None], 0) / tl.sum(weight * share, 0)
    tl.store(out + (token * heads + head) * VALUE + dv, y, mask=dv < VALUE)


@triton.jit
def _tile(tile, starts, sequences, QUERIES: tl.constexpr):
    """The sequence of a tile, where its new tokens begin and end, and where those of the tile begin."""
    low, high = 0, sequences - 1
    while low < high:  # sequence s has its tiles from starts[s] // QUERIES + s on: that is room enough for all of them
        middle = (low + high + 1) // 2
        if tl.load(starts + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle - 1
    begin, end = tl.load(starts + low).to(tl.int32), tl.load(starts + low + 1).to(tl.int32)
    return low, begin, end, begin + (tile - (begin // QUERIES + low)) * QUERIES


@triton.jit
def _share(length, parts, TILE: tl.constexpr, SPLIT: tl.constexpr):
    """Keys of a part of a sequence with several new tokens, the last of which looks at so many."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, parts), TILE) * TILE, SPLIT)


@triton.jit(do_not_specialize=["parts"])  # one program whether or not there are several
def attend_many(
    q, keys, values, tables, starts, positions, out, sums, tops, scale, window, softcap,
    token_q, head_q, page_k, slot_k, head_k, page_v, slot_v, head_v, columns, heads, parts, sequences,
    GROUP: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    HEAD: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile of neighbouring queries of one sequence over a part of its keys, for the heads that share them.
    Sequences with one new token are left to `attend_one`."""
    kv, part = tl.program_id(1), tl.program_id(2)
    sequence, begin, end, mine_from = _tile(tl.program_id(0), starts, sequences, ROWS // SHARE)
    if mine_from >= end or end - begin == 1:
        return
    row, d, dv = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, DV)
    token, head = mine_from + row // SHARE, kv * GROUP + row % SHARE
    mine = (token < end) & (row % SHARE < GROUP)
    at = tl.load(positions + token, mask=mine, other=-1).to(tl.int32)
    first, last = 0, tl.max(at, 0) + 1
    if WINDOW:
        first = tl.maximum(0, tl.load(positions + mine_from).to(tl.int32) - window + 1) // TILE * TILE
    each = _share(tl.load(positions + end - 1).to(tl.int32) + 1, parts, TILE, SPLIT)
    first, last = tl.maximum(first, part * each), tl.minimum(last, (part + 1) * each)
    if first >= last:
        return
    q_at = q + (token * token_q + head * head_q)[:, None] + d[None, :]
    given = tl.load(q_at, mask=mine[:, None] & (d < HEAD)[None, :], other=0.0)
    whole = first
    if not WINDOW:
        lowest = tl.min(tl.where(mine, at, last), 0)
        whole += tl.maximum(0, tl.minimum(last, lowest + 1) - first) // TILE * TILE
    total, weight, top = _walk(
        given, at, first, whole, last, tables + sequence * columns, keys + kv * head_k, values + kv * head_v,
        page_k, slot_k, page_v, slot_v, scale, window, softcap,
        ROWS, SIZE, TILE, HEAD, D, VALUE, DV, WINDOW, SOFTCAP, False,
    )  # fmt: skip
    if parts == 1:
        y_at = out + (token * heads + head)[:, None] * VALUE + dv[None, :]
        tl.store(y_at, total / tl.where(mine, weight, 1.0)[:, None], mask=mine[:, None] & (dv < VALUE)[None, :])
    else:
        place = (token.to(tl.int64) * heads + head) * parts + part
        _keep(sums, tops, place, mine, total, weight, top, DV)


@triton.jit
def combine_many(
    sums, tops, starts, positions, out, window, heads, parts, sequences,
    QUERIES: tl.constexpr, TILE: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """The parts of a tile of queries and one head, put together."""
    head = tl.program_id(1)
    _, begin, end, mine_from = _tile(tl.program_id(0), starts, sequences, QUERIES)
    if mine_from >= end or end - begin == 1:
        return
    token, dv = mine_from + tl.arange(0, QUERIES), tl.arange(0, DV)
    mine = token < end
    at = tl.load(positions + token, mask=mine, other=-1).to(tl.int32)
    each = _share(tl.load(positions + end - 1).to(tl.int32) + 1, parts, TILE, SPLIT)
    level = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, DV], tl.float32)
    for part in range(0, parts):
        there = mine & (part * each <= at)
        if WINDOW:
            there = there & ((part + 1) * each > at - window + 1)
        place = (token.to(tl.int64) * heads + head) * parts + part
        top = tl.load(tops + place * 2, mask=there, other=float("-inf"))
        higher = tl.maximum(level, top)
        zero = tl.where(higher == float("-inf"), 0.0, higher)  # no part was there yet
        shrink, share = tl.exp2(level - zero), tl.exp2(top - zero)
        weight = weight * shrink + tl.load(tops + place * 2 + 1, mask=there, other=0.0) * share
        part_sums = tl.load(sums + place[:, None] * DV + dv[None, :], mask=there[:, None], other=0.0)
        total = total * shrink[:, None] + part_sums * share[:, None]
        level = higher
    y_at = out + (token * heads + head)[:, None] * VALUE + dv[None, :]
    tl.store(y_at, total / tl.where(mine, weight, 1.0)[:, None], mask=mine[:, None] & (dv < VALUE)[None, :])


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, positions: Tensor, scale: float,
    window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """What `operators.paged_attention` means without `single`, as kernels on the current stream."""
    q = q if q.stride(2) == 1 else q.contiguous()
    tokens, heads, head = q.shape
    _, size, groups, value = values.shape
    group, sequences = heads // groups, starts.shape[0] - 1
    out = torch.empty(tokens, heads, value, dtype=q.dtype, device=q.device)
    numbers = (
        *q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], tables.stride(0), heads,
    )  # fmt: skip
    shape = dict(
        SIZE=size, TILE=TILE, HEAD=head, D=_power(head), VALUE=value, DV=_power(value), WINDOW=window > 0,
        SOFTCAP=softcap > 0,
    )  # fmt: skip
    tensors = (q, keys, values, tables, starts, positions, out)
    settings = (scale, window, softcap or 1.0)
    parts = min(MOST_PARTS, -(-tables.shape[1] * size // SPLIT))
    scratch = _scratch(sequences * heads * parts if parts > 1 else 0, shape["DV"], q.device)
    attend_one[(sequences, groups, parts)](
        *tensors, *scratch, *settings, *numbers, parts,
        GROUP=group, ROWS=_power(group), SPLIT=SPLIT, MOST=MOST_PARTS, ONE=parts == 1, **shape,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if parts > 1:
        combine[(sequences, heads)](
            *scratch, starts, positions, out, window, heads, parts, TILE=TILE, VALUE=value, DV=shape["DV"],
            WINDOW=window > 0, SPLIT=SPLIT, MOST=MOST_PARTS, num_warps=2,
        )  # fmt: skip
    if tokens != sequences:
        share = 1 << (group - 1).bit_length()
        rows = max(ROWS, share)
        queries = rows // share
        tiles = tokens // queries + sequences
        parts = _many_parts(-(-tokens // queries) * groups, tables.shape[1] * size)
        scratch = _scratch(tokens * heads * parts if parts > 1 else 0, shape["DV"], q.device)
        attend_many[(tiles, groups, parts)](
            *tensors, *scratch, *settings, *numbers, parts, sequences,
            GROUP=group, SHARE=share, ROWS=rows, SPLIT=MANY_SPLIT, **shape, num_warps=WARPS,
            num_stages=STAGES,
        )  # fmt: skip
        if parts > 1:
            combine_many[(tiles, heads)](
                *scratch, starts, positions, out, window, heads, parts, sequences, QUERIES=queries, TILE=TILE,
                VALUE=value, DV=shape["DV"], WINDOW=window > 0, SPLIT=MANY_SPLIT, num_warps=4,
            )  # fmt: skip
    return out


def _scratch(places: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the sums of parts, and for their top scores and weights."""
    return tuple(torch.empty(places * n, dtype=torch.float32, device=device) for n in (width, 2))  # type: ignore[return-value]


def _many_parts(programs: int, length: int) -> int:
    """Into how many parts sequences with several new tokens are split, where the longest may have such a length."""
    return max(1, min(MANY_PARTS, length // (2 * MANY_SPLIT), -(-ENOUGH // programs)))
