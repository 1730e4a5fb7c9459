"""Philox 4x32-7: four random words that are a function of a key and a counter, on every device, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
ROUNDS = 7  # the fewest with which Philox 4x32 passes BigCrush (Salmon et al., 2011)
ROUND_FACTORS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


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
