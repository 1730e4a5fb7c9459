"""`tessera::uniform`, random numbers that are a function of a seed and of an element's place.

In: a seed drawn elsewhere (int64; its first element counts) and a shape. Out: numbers in [0, 1) that the same seed
gives again, on every device and in every kernel, bit for bit: element i, counted row by row, is word i % 4 of block
i // 4 of Philox 4x32-7 under that seed, and its upper bits are the number's fraction. Backward can therefore draw a
mask again instead of keeping it, and a kernel can draw its part of it where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.ir.types import Size
from tessera.ops.families import per_element
from tessera.ops.op import declare

WORD = 0xFFFFFFFF
ROUNDS = 7  # the fewest with which Philox 4x32 passes BigCrush (Salmon et al., 2011)
ROUND_FACTORS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # of a fraction, so that no number rounds to 1
COST = 17  # instructions an element, a quarter of a block


def block(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words of Philox 4x32-7 for a 64-bit key and counter, held in int64."""
    seed, counter = torch.broadcast_tensors(seed.long(), counter.long())
    key = [seed & WORD, (seed >> 32) & WORD]
    zero = torch.zeros_like(counter)
    c = [counter & WORD, (counter >> 32) & WORD, zero, zero]
    for _ in range(ROUNDS):
        # products of int64 wrap, but their bits are those of the unsigned product
        first, second = c[0] * ROUND_FACTORS[0], c[2] * ROUND_FACTORS[1]
        c = [
            ((second >> 32) & WORD) ^ c[1] ^ key[0],
            second & WORD,
            ((first >> 32) & WORD) ^ c[3] ^ key[1],
            first & WORD,
        ]
        key = [(k + step) & WORD for k, step in zip(key, KEY_STEPS, strict=True)]
    return c[0], c[1], c[2], c[3]


def check_seed(seed: Tensor, dtype: torch.dtype) -> None:
    if seed.dtype is not torch.int64 or seed.numel() == 0:
        raise TypeError(f"tessera::uniform: expected a seed of int64, got {seed.dtype}{list(seed.shape)}")
    if dtype not in BITS:
        raise TypeError(f"tessera::uniform: expected one of {', '.join(map(str, BITS))}, got {dtype}")


def _draw(seed: Tensor, size: Sequence[Size], *, dtype: torch.dtype) -> Tensor:
    check_seed(seed, dtype)
    count = 1
    for n in size:
        count *= int(n)
    counters = torch.arange((count + 3) // 4, device=seed.device)
    words = torch.stack(block(seed.reshape(-1)[0], counters), 1).reshape(-1)[:count]
    return ((words >> (32 - BITS[dtype])).to(dtype) * 2.0 ** -BITS[dtype]).reshape(list(size))


def _empty(seed: Tensor, size: Sequence[Size], *, dtype: torch.dtype) -> Tensor:
    check_seed(seed, dtype)
    return seed.new_empty(list(size), dtype=dtype)


_operator = torch.library.custom_op(
    "tessera::uniform", _draw, mutates_args=(), schema="(Tensor seed, SymInt[] size, *, ScalarType dtype) -> Tensor"
)
_operator.register_fake(_empty)
uniform = torch.ops.tessera.uniform.default

declare("tessera.uniform", "computed random", zero=True, cost=per_element(COST))
