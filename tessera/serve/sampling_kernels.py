"""Choosing tokens on a GPU: two Triton programs that read the logits once, and a part of them twice.

In: logits [rows, vocabulary] of any float type, and temperature, seed and counter of every row, or none of the three
where all rows take the likeliest token. Out: what `sampling.choose` means. `measure` takes a part of a row: its highest
logit, and the sum of its weights. `pick` finds the part in which a row's random number falls, and then the token in it.
What a row gives does not depend on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tessera.ops.uniform import KEY_STEPS, ROUND_FACTORS, ROUNDS, WORD

PART = 4096  # logits at a time
_WORD, _ROUNDS = tl.constexpr(WORD), tl.constexpr(ROUNDS)
_FACTOR_0, _FACTOR_1 = tl.constexpr(ROUND_FACTORS[0]), tl.constexpr(ROUND_FACTORS[1])
_STEP_0, _STEP_1 = tl.constexpr(KEY_STEPS[0]), tl.constexpr(KEY_STEPS[1])
_LEAST = tl.constexpr(1e-6)  # of a temperature above 0


@triton.jit
def _uniform(seed, counter):
    """A number in [0, 1) of 53 bits: the first two words of Philox, as `tessera.ops.uniform.block` gives them."""
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
def measure(
    logits, temperature, tops, places, sums, vocabulary, stride, parts, PART: tl.constexpr, DRAWS: tl.constexpr
):  # fmt: skip
    """The highest logit of a part, infinite where any is NaN; its place; and the sum of the weights, which are
    exp((logit - highest) / temperature)."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    x = tl.where(x != x, float("-inf"), x)
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
    logits, temperature, seeds, counters, tops, places, sums, out, vocabulary, stride, parts,
    PARTS: tl.constexpr, PART: tl.constexpr, DRAWS: tl.constexpr,
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
            x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocabulary, other=float("-inf"))
            share = tl.exp((x.to(tl.float32) - best) / warmth)
            upto = tl.cumsum(share.to(tl.float64), 0)
            last = tl.max(tl.where(share > 0.0, i, 0), 0)
            token = part * PART + tl.minimum(tl.sum((upto <= target).to(tl.int32), 0), last)
    tl.store(out + row, tl.where(fine, token, -1).to(tl.int64))


def choose(logits: Tensor, temperature: Tensor | None, seed: Tensor | None, counter: Tensor | None) -> Tensor:
    """A token for each row."""
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parts, draws = triton.cdiv(vocabulary, PART), temperature is not None
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    tops, sums = (torch.empty(rows * parts, dtype=torch.float32, device=logits.device) for _ in range(2))
    places = torch.empty(rows * parts, dtype=torch.int32, device=logits.device)
    sizes = vocabulary, logits.stride(0), parts
    measure[(rows, parts)](logits, temperature, tops, places, sums, *sizes, PART=PART, DRAWS=draws, num_warps=8)
    pick[(rows,)](
        logits, temperature, seed, counter, tops, places, sums, out, *sizes,
        PARTS=triton.next_power_of_2(parts), PART=PART, DRAWS=draws, num_warps=8,
    )  # fmt: skip
    return out
