"""Kernels of deterministic steps: sums that are cut by the sequence or the weight alone, never by who else is there.

Where a sum is cut is fixed: keys every `KEYS` places of a sequence, products every so many columns of the weight. Each
part is summed by itself, then parts are added in order. So it makes no difference whether one program walks through all
parts or each has a program of its own and another one adds them: the launch chooses what keeps the machine busy, and
the bits stay. For that, both ways use the same tiles of matrix units, and nothing but those may fuse a product with a
sum (`enable_fp_fusion`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tessera.serve.paged_kernels import TILE, _keep, _power, _scratch, _tile, _walk

KEYS = 512  # of a part
ROWS = 64  # queries times heads of a tile; one of single tokens has as many, or matrix units would add otherwise
ENOUGH = 1024  # programs that keep a GPU busy
SCRATCH = 1 << 26  # numbers that parts may be kept in
COLUMNS, DEPTH = (
    128,
    64,
)  # of a tile of a product: on Hopper each warp group multiplies 64 rows, whatever the tile's rows
PART, MOST_PARTS = 512, 8  # columns of a weight that a part has at least
SHORT = 256  # rows up to which tiles are half as tall
NEIGHBOURS = 16  # tiles of rows that read a weight at about the same time
EXACT = {"enable_fp_fusion": False}


# --- attention ---


@triton.jit
def _merge(sums, weight, top, more, more_weight, more_top):
    """What some keys gave, and what the part after them did."""
    higher = tl.maximum(top, more_top)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen nothing yet
    old, new = tl.exp2(top - level), tl.exp2(more_top - level)
    return sums * old[:, None] + more * new[:, None], weight * old + more_weight * new, higher


@triton.jit
def _span(positions, mine_from, at, window, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The keys that the queries of a tile see."""
    first = 0
    if WINDOW:
        first = tl.maximum(0, tl.load(positions + mine_from).to(tl.int32) - window + 1) // TILE * TILE
    return first, tl.max(at, 0) + 1


@triton.jit(do_not_specialize=["columns", "parts", "run", "sequences"])
def attend(
    q, keys, values, tables, starts, positions, out, sums, tops, scale, window, softcap,
    token_q, head_q, page_k, slot_k, head_k, page_v, slot_v, head_v, columns, heads, parts, run, sequences,
    GROUP: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    HEAD: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, KEYS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """A tile of neighbouring queries of one sequence over `run` parts of its keys, for the heads that share them. With
    KEEPS that is one part, which is kept for `combine`."""
    kv, turn = tl.program_id(1), tl.program_id(2)
    sequence, begin, end, mine_from = _tile(tl.program_id(0), starts, sequences, ROWS // SHARE)
    if mine_from >= end:
        return
    row, d, dv = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, DV)
    token, head = mine_from + row // SHARE, kv * GROUP + row % SHARE
    mine = (token < end) & (row % SHARE < GROUP)
    at = tl.load(positions + token, mask=mine, other=-1).to(tl.int32)
    first, last = _span(positions, mine_from, at, window, WINDOW, TILE)
    low, high = tl.maximum(first // KEYS, turn * run), tl.minimum(tl.cdiv(last, KEYS), (turn + 1) * run)
    if low >= high:
        return
    q_at = q + (token * token_q + head * head_q)[:, None] + d[None, :]
    given = tl.load(q_at, mask=mine[:, None] & (d < HEAD)[None, :], other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DV], tl.float32)
    for part in range(low, high):
        start = tl.maximum(first, part * KEYS)
        more, more_weight, more_top = _walk(
            given, at, start, start, tl.minimum(last, (part + 1) * KEYS), tables + sequence * columns,
            keys + kv * head_k, values + kv * head_v, page_k, slot_k, page_v, slot_v, scale, window, softcap,
            ROWS, SIZE, TILE, HEAD, D, VALUE, DV, WINDOW, SOFTCAP,
        )  # fmt: skip
        total, weight, top = _merge(total, weight, top, more, more_weight, more_top)
    if KEEPS:
        place = (token.to(tl.int64) * heads + head) * parts + turn
        _keep(sums, tops, place, mine, total, weight, top, DV)
    else:
        y_at = out + (token * heads + head)[:, None] * VALUE + dv[None, :]
        tl.store(y_at, total / tl.where(mine, weight, 1.0)[:, None], mask=mine[:, None] & (dv < VALUE)[None, :])


@triton.jit(do_not_specialize=["parts", "sequences"])
def combine(
    sums, tops, starts, positions, out, window, heads, parts, sequences,
    QUERIES: tl.constexpr, TILE: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """The parts of a tile of queries and one head, put together as `attend` would have."""
    head = tl.program_id(1)
    _, _, end, mine_from = _tile(tl.program_id(0), starts, sequences, QUERIES)
    if mine_from >= end:
        return
    token, dv = mine_from + tl.arange(0, QUERIES), tl.arange(0, DV)
    mine = token < end
    at = tl.load(positions + token, mask=mine, other=-1).to(tl.int32)
    first, last = _span(positions, mine_from, at, window, WINDOW, TILE)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, DV], tl.float32)
    for part in range(first // KEYS, tl.cdiv(last, KEYS)):
        place = (token.to(tl.int64) * heads + head) * parts + part
        more = tl.load(sums + place[:, None] * DV + dv[None, :], mask=mine[:, None], other=0.0)
        more_top = tl.load(tops + place * 2, mask=mine, other=float("-inf"))
        more_weight = tl.load(tops + place * 2 + 1, mask=mine, other=0.0)
        total, weight, top = _merge(total, weight, top, more, more_weight, more_top)
    y_at = out + (token * heads + head)[:, None] * VALUE + dv[None, :]
    tl.store(y_at, total / tl.where(mine, weight, 1.0)[:, None], mask=mine[:, None] & (dv < VALUE)[None, :])


def attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, positions: Tensor, scale: float,
    window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """What `operators.paged_attention` means with `single`."""
    q = q if q.stride(2) == 1 else q.contiguous()
    tokens, heads, head = q.shape
    _, size, groups, value = values.shape
    group, sequences = heads // groups, starts.shape[0] - 1
    share = 1 << (group - 1).bit_length()
    queries, width = max(ROWS, share) // share, _power(value)
    tiles, parts = tokens // queries + sequences, -(-tables.shape[1] * size // KEYS)
    keeps = parts > 1 and tiles * groups < ENOUGH and tokens * heads * parts * width <= SCRATCH
    out = torch.empty(tokens, heads, value, dtype=q.dtype, device=q.device)
    scratch = _scratch(tokens * heads * parts if keeps else 0, width, q.device)
    shape = dict(TILE=TILE, VALUE=value, DV=width, WINDOW=window > 0, KEYS=KEYS)
    attend[(tiles, groups, parts if keeps else 1)](
        q, keys, values, tables, starts, positions, out, *scratch, scale, window, softcap or 1.0, *q.stride()[:2],
        *keys.stride()[:3], *values.stride()[:3], tables.stride(0), heads, parts, 1 if keeps else parts, sequences,
        GROUP=group, SHARE=share, ROWS=max(ROWS, share), SIZE=size, HEAD=head, D=_power(head), SOFTCAP=softcap > 0,
        KEEPS=keeps, **shape, num_warps=4, num_stages=2, **EXACT,
    )  # fmt: skip
    if keeps:
        combine[(tiles, heads)](
            *scratch, starts, positions, out, window, heads, parts, sequences, QUERIES=queries, **shape, num_warps=4,
            **EXACT,
        )  # fmt: skip
    return out


# --- products ---


@triton.jit(do_not_specialize=["m"])
def product(
    x, weight, bias, y, sums, m, n, k, row_x, row_w, deep_w, part,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, KEEPS: tl.constexpr,
    BIAS: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """A tile of x times the weight, transposed. With KEEPS the sums of one part, for `add_parts`."""
    tall, wide = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    band = tl.program_id(0) // (NEIGHBOURS * wide)
    height = tl.minimum(tall - band * NEIGHBOURS, NEIGHBOURS)
    inside = tl.program_id(0) % (NEIGHBOURS * wide)
    row = ((band * NEIGHBOURS + inside % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = ((inside // height) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    deep = tl.arange(0, DEPTH)
    x_at, w_at = x + row[:, None] * row_x, weight + column[None, :] * row_w
    low, high = 0, PARTS
    if KEEPS:
        low, high = tl.program_id(1), tl.program_id(1) + 1
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for index in range(low, high):
        summed = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(index * part, tl.minimum((index + 1) * part, k), DEPTH):
            at = start + deep
            a = tl.load(x_at + at[None, :], mask=(row < m)[:, None] & (at < k)[None, :], other=0.0)
            b = tl.load(w_at + at[:, None] * deep_w, mask=(column < n)[None, :] & (at < k)[:, None], other=0.0)
            summed = tl.dot(a, b, summed, input_precision="ieee")
        total += summed
    mine = (row < m)[:, None] & (column < n)[None, :]
    if KEEPS:
        tl.store(sums + (tl.program_id(1) * m + row)[:, None] * n + column[None, :], total, mask=mine)
    else:
        if BIAS:
            total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        tl.store(y + row[:, None] * n + column[None, :], total, mask=mine)


@triton.jit(do_not_specialize=["m"])
def add_parts(sums, bias, y, m, n, PARTS: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mine = column < n
    total = tl.zeros([COLUMNS], tl.float32)
    for part in range(PARTS):
        total += tl.load(sums + (part * m + row) * n + column, mask=mine, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=mine, other=0.0).to(tl.float32)
    tl.store(y + row * n + column, total, mask=mine)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `invariant.invariant_linear` means."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    (m, k), n = rows.shape, len(weight)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    part = -(-max(PART, -(-k // MOST_PARTS)) // DEPTH) * DEPTH  # by the weight alone
    parts = -(-k // part)
    height = ROWS if m <= SHORT else 2 * ROWS
    tiles = -(-m // height) * -(-n // COLUMNS)
    keeps = parts > 1 and tiles < ENOUGH // 4 and parts * m * n <= SCRATCH
    sums = torch.empty(parts * m * n if keeps else 0, dtype=torch.float32, device=x.device)
    flags = {"PARTS": parts, "BIAS": bias is not None, **EXACT}
    product[(tiles, parts if keeps else 1)](
        rows, weight, bias, y, sums, m, n, k, rows.stride(0), *weight.stride(), part, ROWS=height, COLUMNS=COLUMNS,
        DEPTH=DEPTH, KEEPS=keeps, NEIGHBOURS=NEIGHBOURS, num_warps=height // 16, num_stages=3, **flags,
    )  # fmt: skip
    if keeps:
        add_parts[(m, -(-n // 1024))](sums, bias, y, m, n, COLUMNS=1024, num_warps=4, **flags)
    return y.view(*x.shape[:-1], n)
