"""Kernels of deterministic steps: sums that are cut by the sequence or the weight alone, never by who else is there.

Where a sum is cut is fixed: keys every `KEYS` places of a sequence, products every so many columns of the weight. Each
part is summed by itself, then parts are added in order. So it makes no difference whether one program walks through all
parts or each has a program of its own and another one adds them: the launch chooses what keeps the machine busy, and
the bits stay.

Nor does it matter how large a tile is, or which operand lies along its rows: within a part every sum is the matrix
unit's, sixteen terms at a time, in order. For that, nothing else may fuse a product with a sum (`enable_fp_fusion`),
and a device must have one kind of matrix unit for tiles of all sizes, as Hopper and those before it have.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tessera.serve.paged_kernels import TILE, _capped, _keep, _power, _scratch, _tile, _walk

KEYS = 512  # of a part
ROWS, FEW = 64, 8  # queries times heads of a tile: of several tokens, and of a single one
ENOUGH = 1024  # programs that keep a GPU busy
LAUNCHED = 32  # parts of a single token that are launched side by side, at most; programs cost time that find no keys
SCRATCH = 1 << 26  # numbers that parts may be kept in
# Columns of a weight that a part has at least, in multiples of `DEPTH`.
PART, MOST_PARTS, DEPTH = 1024, 8, 128
TILES = ((128, 128, 128), (64, 64, 256), (64, 32, 256))  # of a product: rows, columns, bytes of depth
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


@triton.jit
def _queries(starts, sequences, QUERIES: tl.constexpr, SINGLE: tl.constexpr):
    """The sequence of a program, and its queries from the first to the end: none if the other launch has them."""
    if SINGLE:
        sequence = tl.program_id(0)
        first, end = tl.load(starts + sequence).to(tl.int32), tl.load(starts + sequence + 1).to(tl.int32)
        end = tl.where(end - first == 1, end, first)
    else:
        sequence, begin, end, first = _tile(tl.program_id(0), starts, sequences, QUERIES)
        end = tl.where(end - begin == 1, begin, end)
    return sequence, first, end


@triton.jit
def _walk_across(
    q, at, first, last, table, keys, values, page_k, slot_k, page_v, slot_v, scale, window, softcap,
    ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr,
    VALUE: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """As `_walk`, for few rows. The matrix unit has 64 rows, of which few queries would leave most empty: so keys lie
    along its rows, and queries along its columns, of which eight are enough."""
    given, d, dv = tl.trans(q), tl.arange(0, D), tl.arange(0, DV)
    ones = tl.full([TILE, TILE], 1.0, q.dtype)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([TILE, ROWS], tl.float32)  # a column has it as often as a tile has keys
    sums = tl.zeros([DV, ROWS], tl.float32)
    for start in range(first, last, TILE):
        where = start + tl.arange(0, TILE)
        inside = where < last
        page = tl.load(table + where // SIZE, mask=inside, other=0).to(tl.int64)
        k_at = keys + (page * page_k + (where % SIZE) * slot_k)[:, None] + d[None, :]
        k = tl.load(k_at, mask=inside[:, None] & (d < HEAD)[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(k, given, input_precision="ieee") * scale
        if SOFTCAP:
            scores = _capped(scores, softcap)
        scores *= 1.4426950408889634  # powers of 2 from here on
        seen = inside[:, None] & (where[:, None] <= at[None, :])
        if WINDOW:
            seen = seen & (where[:, None] > at[None, :] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(scores - level[None, :]).to(q.dtype)
        shrink = tl.exp2(top - level)
        v_at = values + (page * page_v + (where % SIZE) * slot_v)[:, None] + dv[None, :]
        v = tl.load(v_at, mask=inside[:, None] & (dv < VALUE)[None, :], other=0.0).to(q.dtype)
        weight = weight * shrink[None, :] + tl.dot(ones, share, input_precision="ieee")
        sums = sums * shrink[None, :] + tl.dot(tl.trans(v), share, input_precision="ieee")
        top = higher
    return tl.trans(sums), tl.max(weight, 0), top


@triton.jit(do_not_specialize=["columns", "parts", "run", "sequences"])
def attend(
    q, keys, values, tables, starts, positions, out, sums, tops, scale, window, softcap,
    token_q, head_q, page_k, slot_k, head_k, page_v, slot_v, head_v, columns, heads, parts, run, sequences,
    GROUP: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    HEAD: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, KEYS: tl.constexpr, KEEPS: tl.constexpr, SINGLE: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """A tile of neighbouring queries of one sequence over `run` parts of its keys, for the heads that share them. With
    KEEPS each part is kept for `combine`. With SINGLE sequences with one new token, else the others."""
    kv, turn = tl.program_id(1), tl.program_id(2)
    sequence, mine_from, end = _queries(starts, sequences, ROWS // SHARE, SINGLE)
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
    table, keys, values = tables + sequence * columns, keys + kv * head_k, values + kv * head_v
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DV], tl.float32)
    for part in range(low, high):
        start, stop = tl.maximum(first, part * KEYS), tl.minimum(last, (part + 1) * KEYS)
        if ACROSS:
            more, more_weight, more_top = _walk_across(
                given, at, start, stop, table, keys, values, page_k, slot_k, page_v, slot_v, scale, window, softcap,
                ROWS, SIZE, TILE, HEAD, D, VALUE, DV, WINDOW, SOFTCAP,
            )  # fmt: skip
        else:
            more, more_weight, more_top = _walk(
                given, at, start, start, stop, table, keys, values, page_k, slot_k, page_v, slot_v, scale, window,
                softcap, ROWS, SIZE, TILE, HEAD, D, VALUE, DV, WINDOW, SOFTCAP, True,
            )  # fmt: skip
        if KEEPS:
            place = (token.to(tl.int64) * heads + head) * parts + part
            _keep(sums, tops, place, mine, more, more_weight, more_top, DV)
        else:
            total, weight, top = _merge(total, weight, top, more, more_weight, more_top)
    if not KEEPS:
        y_at = out + (token * heads + head)[:, None] * VALUE + dv[None, :]
        tl.store(y_at, total / tl.where(mine, weight, 1.0)[:, None], mask=mine[:, None] & (dv < VALUE)[None, :])


@triton.jit(do_not_specialize=["parts", "sequences"])
def combine(
    sums, tops, starts, positions, out, window, heads, parts, sequences,
    QUERIES: tl.constexpr, TILE: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr,
    KEYS: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """The parts of a tile of queries and one head, put together as `attend` would have."""
    head = tl.program_id(1)
    _, mine_from, end = _queries(starts, sequences, QUERIES, SINGLE)
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
    share, width = 1 << (group - 1).bit_length(), _power(value)
    parts = -(-tables.shape[1] * size // KEYS)
    out = torch.empty(tokens, heads, value, dtype=q.dtype, device=q.device)
    shape = dict(TILE=TILE, VALUE=value, DV=width, WINDOW=window > 0, KEYS=KEYS)
    for single in (True, False)[: 1 + (tokens != sequences)]:
        across = single and _narrow(q.device)
        rows = max(FEW if across else ROWS, share)
        queries = rows // share
        tiles = sequences if single else tokens // queries + sequences
        keeps = parts > 1 and tokens * heads * parts * width <= SCRATCH and (single or tiles * groups < ENOUGH)
        run = -(-parts // LAUNCHED) if keeps else parts
        scratch = _scratch(tokens * heads * parts if keeps else 0, width, q.device)
        attend[(tiles, groups, -(-parts // run))](
            q, keys, values, tables, starts, positions, out, *scratch, scale, window, softcap or 1.0, *q.stride()[:2],
            *keys.stride()[:3], *values.stride()[:3], tables.stride(0), heads, parts, run, sequences, GROUP=group,
            SHARE=share, ROWS=rows, SIZE=size, HEAD=head, D=_power(head), SOFTCAP=softcap > 0, KEEPS=keeps,
            SINGLE=single, ACROSS=across, **shape, num_warps=4,
            num_stages=min(3 if across else 2, _device(q.device)[1] // (2 * TILE * width * q.element_size())), **EXACT,
        )  # fmt: skip
        if keeps:
            combine[(tiles, heads)](
                *scratch, starts, positions, out, window, heads, parts, sequences, QUERIES=1 if single else queries,
                SINGLE=single, **shape, num_warps=1 if single else 4, **EXACT,
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
    plan = _plan(m, n, -(-k // part), x.element_size(), x.device)
    sums = torch.empty(plan.parts * m * n if plan.keeps else 0, dtype=torch.float32, device=x.device)
    flags = {"PARTS": plan.parts, "BIAS": bias is not None, **EXACT}
    product[(plan.tiles, plan.parts if plan.keeps else 1)](
        rows, weight, bias, y, sums, m, n, k, rows.stride(0), *weight.stride(), part, ROWS=plan.rows,
        COLUMNS=plan.columns, DEPTH=plan.depth, KEEPS=plan.keeps, NEIGHBOURS=NEIGHBOURS, num_warps=plan.rows // 16,
        num_stages=plan.stages, **flags,
    )  # fmt: skip
    if plan.keeps:
        add_parts[(m, -(-n // 1024))](sums, bias, y, m, n, COLUMNS=1024, num_warps=4, **flags)
    return y.view(*x.shape[:-1], n)


class _Plan(NamedTuple):
    """How a product is launched: none of it changes a bit."""

    rows: int  # of a tile
    columns: int
    depth: int
    tiles: int
    parts: int
    keeps: bool  # each part has programs of its own
    stages: int


def _plan(m: int, n: int, parts: int, size: int, device: torch.device) -> _Plan:
    """The largest tiles of which nearly all multiprocessors get one; small ones where there are few rows."""
    units, shared = _device(device)
    for rows, columns, depth in TILES:
        tiles = -(-m // rows) * -(-n // columns)
        keeps = parts > 1 and 2 * tiles < 3 * units and parts * m * n <= SCRATCH
        programs = tiles * (parts if keeps else 1)
        # Who has a multiprocessor to himself, or a long way to go, reads further ahead.
        ahead = 4 if programs <= units or (parts > 1 and not keeps) else 3
        stages = min(ahead, shared // ((rows + columns) * depth))
        plan = _Plan(rows, columns, depth // size, tiles, parts, keeps, stages)
        if 3 * programs >= 2 * units and rows <= max(64, m):
            break
    return plan


# --- the device ---


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """Its multiprocessors, and the bytes of shared memory that a program may have."""
    if device.type == "cpu":  # the interpreter
        return 132, 1 << 17
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, facts.shared_memory_per_block_optin


@functools.cache
def _narrow(device: torch.device) -> bool:
    """May tiles be narrow? Blackwell has another matrix unit for them."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] <= 9
