"""Choosing tokens on a GPU: two Triton programs that read the logits once, and a part of them twice.

In: logits [rows, vocabulary] of any float type, and temperature, seed and counter of every row, or none of the three
where all rows take the likeliest token. Out: what `sampling.choose` means. `measure` takes a part of a row: its highest
logit, and the sum of its weights. `pick` finds the part in which a row's random number falls, and then the token in it.
What a row gives does not depend on its neighbours.

Where rows leave tokens out, `bound` comes first. Whatever top_k, top_p and min_p leave is all above one logit and, of
those that are equal to it, the first: so two numbers a row say it, and nothing is sorted. They are found bit by bit:
the largest logit from which on there are k tokens, or from which on they have the probability p.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tessera.util.philox import KEY_STEPS, ROUND_FACTORS, ROUNDS, WORD

PART, TILE = 4096, 2048  # logits at a time, to choose and to find a bound
_WORD, _ROUNDS = tl.constexpr(WORD), tl.constexpr(ROUNDS)
_FACTOR_0, _FACTOR_1 = tl.constexpr(ROUND_FACTORS[0]), tl.constexpr(ROUND_FACTORS[1])
_STEP_0, _STEP_1 = tl.constexpr(KEY_STEPS[0]), tl.constexpr(KEY_STEPS[1])
_LEAST = tl.constexpr(1e-6)  # of a temperature above 0
_DIGIT, _DIGITS = tl.constexpr(3), tl.constexpr(8)  # bits of a bound that one reading of the row tells, and values
_WIDTH = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}  # bits of a logit that float32 tells apart


@triton.jit
def _uniform(seed, counter):
    """A number in [0, 1) of 53 bits: the first two words of Philox, as `tessera.util.philox.block` gives them."""
    key, other = seed.to(tl.uint64) & _WORD, seed.to(tl.uint64) >> 32
    c0, c1 = counter.to(tl.uint64) & _WORD, counter.to(tl.uint64) >> 32
    c2, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(_ROUNDS):
        first, second = c0 * _FACTOR_0, c2 * _FACTOR_1
        c0, c1 = (second >> 32) ^ c1 ^ key, second & _WORD
        c2, c3 = (first >> 32) ^ c3 ^ other, first & _WORD
        key, other = (key + _STEP_0) & _WORD, (other + _STEP_1) & _WORD
    return ((c0 << 21) ^ (c1 >> 11)).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _load(logits, at, vocabulary):
    return tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(x, BITS: tl.constexpr):
    """Whole numbers in the order of the logits, equal where they are. None is 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)  # -0 is 0
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000) >> (32 - BITS)


@triton.jit
def _from_on(
    logits, vocabulary, target, least, top, warmth, MASS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr
):
    """The largest key from which on the row has at least `target` tokens; with MASS, weights that sum up to it, of the
    keys that are at least `least`."""
    digits = tl.arange(0, _DIGITS).to(tl.uint32)
    least_key = tl.zeros([], tl.uint32)
    for turn in range((BITS + _DIGIT - 1) // _DIGIT):
        shift = tl.maximum(BITS - _DIGIT * (turn + 1), 0)
        tried = least_key + (digits << shift.to(tl.uint32))
        sums = tl.zeros([_DIGITS], tl.float64)
        for start in range(0, vocabulary, TILE):
            x = _load(logits, start + tl.arange(0, TILE), vocabulary)
            key = _key(x, BITS)
            if MASS:
                weight = tl.where(key >= least, tl.exp((x - top) / warmth), 0.0)
            else:
                weight = tl.where(x == x, 1.0, 0.0)
            sums += tl.sum(tl.where(key[:, None] >= tried[None, :], weight.to(tl.float64)[:, None], 0.0), 0)
        least_key += tl.max(tl.where(sums >= target, digits, 0), 0).to(tl.uint32) << shift.to(tl.uint32)
    return least_key


@triton.jit
def bound(
    logits, temperature, top_k, top_p, min_p, leasts, lasts, vocabulary, stride, BITS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The least logit that a row leaves, and the last token with this logit that it leaves."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    few, mass, ratio = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    value, last = float("-inf"), vocabulary
    top = float("-inf")
    if few > 0 or mass < 1.0 or ratio > 0.0:
        for start in range(0, vocabulary, TILE):
            x = _load(logits, start + tl.arange(0, TILE), vocabulary)
            top = tl.maximum(top, tl.max(tl.where(x != x, float("inf"), x), 0))
    if tl.abs(top) < float("inf"):  # else no token is chosen
        warmth = tl.maximum(tl.load(temperature + row).to(tl.float32), _LEAST)
        least = tl.zeros([], tl.uint32)
        if few > 0:
            least = _from_on(logits, vocabulary, few.to(tl.float64), least, top, warmth, False, BITS, TILE)
        total = tl.zeros([], tl.float64)
        likely = tl.full([], 0xFFFFFFFF, tl.uint32)
        for start in range(0, vocabulary, TILE):
            x = _load(logits, start + tl.arange(0, TILE), vocabulary)
            key, weight = _key(x, BITS), tl.exp((x - top) / warmth)
            total += tl.sum(tl.where(key >= least, weight, 0.0).to(tl.float64), 0)
            likely = tl.minimum(likely, tl.min(tl.where(weight >= ratio, key, 0xFFFFFFFF), 0))
        target = total * mass.to(tl.float64)
        cut = tl.zeros([], tl.uint32)
        if mass < 1.0:
            cut = _from_on(logits, vocabulary, target, least, top, warmth, True, BITS, TILE)
        least = tl.maximum(least, tl.maximum(likely, cut))
        above = tl.zeros([], tl.float64)
        if cut == least:
            for start in range(0, vocabulary, TILE):
                x = _load(logits, start + tl.arange(0, TILE), vocabulary)
                weight = tl.where(_key(x, BITS) > cut, tl.exp((x - top) / warmth), 0.0)
                above += tl.sum(weight.to(tl.float64), 0)
        seen, last = 0, 0
        for start in range(0, vocabulary, TILE):
            at = start + tl.arange(0, TILE)
            x = _load(logits, at, vocabulary)
            equal = _key(x, BITS) == least
            before = seen + tl.cumsum(equal.to(tl.int32), 0) - 1
            upto = above + before.to(tl.float64) * tl.exp((x - top) / warmth).to(tl.float64)
            last = tl.maximum(last, tl.max(tl.where(equal & ((cut != least) | (upto < target)), at, 0), 0))
            value = tl.maximum(value, tl.max(tl.where(equal, x, float("-inf")), 0))
            seen += tl.sum(equal.to(tl.int32), 0)
    tl.store(leasts + row, value)
    tl.store(lasts + row, last)


@triton.jit
def _left(x, at, leasts, lasts, row, CUTS: tl.constexpr):
    """The logits that are left."""
    if CUTS:
        least, last = tl.load(leasts + row), tl.load(lasts + row)
        x = tl.where((x > least) | ((x == least) & (at <= last)), x, float("-inf"))
    return x


@triton.jit
def measure(
    logits, temperature, leasts, lasts, tops, places, sums, vocabulary, stride, parts,
    PART: tl.constexpr, DRAWS: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """The highest logit of a part, infinite where any is NaN; its place; and the sum of the weights, which are
    exp((logit - highest) / temperature)."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = _load(logits + row.to(tl.int64) * stride, at, vocabulary)
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    x = _left(tl.where(x != x, float("-inf"), x), at, leasts, lasts, row, CUTS)
    top = tl.max(x, 0)
    out = row * parts + part
    tl.store(places + out, tl.argmax(x, 0))
    tl.store(tops + out, tl.where(broken, float("inf"), top))
    if DRAWS:
        warmth = tl.maximum(tl.load(temperature + row).to(tl.float32), _LEAST)
        level = tl.where(top == float("-inf"), 0.0, top)
        tl.store(sums + out, tl.sum(tl.exp((x - level) / warmth), 0))


@triton.jit
def pick(
    logits, temperature, seeds, counters, leasts, lasts, tops, places, sums, out, vocabulary, stride, parts,
    PARTS: tl.constexpr, PART: tl.constexpr, DRAWS: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """A row's token; -1 where its highest logit is infinite."""
    row = tl.program_id(0)
    p = tl.arange(0, PARTS)
    top = tl.load(tops + row * parts + p, mask=p < parts, other=float("-inf"))
    best = tl.max(top, 0)
    fine = tl.abs(best) < float("inf")
    part = tl.argmax(top, 0)
    token = part * PART + tl.load(places + row * parts + part)
    if DRAWS:
        asked = tl.load(temperature + row).to(tl.float32)
        if fine and asked > 0.0:
            warmth = tl.maximum(asked, _LEAST)
            weight = tl.load(sums + row * parts + p, mask=p < parts, other=0.0) * tl.exp((top - best) / warmth)
            upto = tl.cumsum(weight.to(tl.float64), 0)
            target = _uniform(tl.load(seeds + row), tl.load(counters + row)) * tl.max(upto, 0)
            # Rounding may put the number behind all weights: the last one that is not 0 has it then.
            last = tl.max(tl.where(weight > 0.0, p, 0), 0)
            part = tl.minimum(tl.sum((upto <= target).to(tl.int32), 0), last)
            target = target - tl.max(tl.where(p < part, upto, 0.0), 0)
            i = tl.arange(0, PART)
            at = part * PART + i
            x = _left(_load(logits + row.to(tl.int64) * stride, at, vocabulary), at, leasts, lasts, row, CUTS)
            share = tl.exp((x - best) / warmth)
            upto = tl.cumsum(share.to(tl.float64), 0)
            last = tl.max(tl.where(share > 0.0, i, 0), 0)
            token = part * PART + tl.minimum(tl.sum((upto <= target).to(tl.int32), 0), last)
    tl.store(out + row, tl.where(fine, token, -1).to(tl.int64))


def bounds(logits: Tensor, temperature: Tensor, cuts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of every row the least logit that is left by its top_k, top_p and min_p, and the last token that has it."""
    rows, vocabulary = logits.shape
    leasts = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lasts = torch.empty(rows, dtype=torch.int32, device=logits.device)
    bits = _WIDTH[logits.dtype]
    bound[(rows,)](
        logits, temperature, *cuts, leasts, lasts, vocabulary, logits.stride(0), BITS=bits, TILE=TILE, num_warps=16
    )
    return leasts, lasts


def choose(
    logits: Tensor, temperature: Tensor | None, seed: Tensor | None, counter: Tensor | None,
    cuts: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """A token for each row."""
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parts, draws = triton.cdiv(vocabulary, PART), temperature is not None
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    tops, sums = (torch.empty(rows * parts, dtype=torch.float32, device=logits.device) for _ in range(2))
    places = torch.empty(rows * parts, dtype=torch.int32, device=logits.device)
    limits = (None, None) if cuts is None or temperature is None else bounds(logits, temperature, cuts)
    sizes = vocabulary, logits.stride(0), parts
    flags = {"PART": PART, "DRAWS": draws, "CUTS": limits[0] is not None, "num_warps": 8}
    measure[(rows, parts)](logits, temperature, *limits, tops, places, sums, *sizes, **flags)
    pick[(rows,)](
        logits, temperature, seed, counter, *limits, tops, places, sums, out, *sizes,
        PARTS=triton.next_power_of_2(parts), **flags,
    )  # fmt: skip
    return out
