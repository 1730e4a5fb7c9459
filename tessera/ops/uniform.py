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
from tessera.util.philox import block

BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # of a fraction, so that no number rounds to 1
COST = 17  # instructions an element, a quarter of a block


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


library = torch.library.Library("tessera", "FRAGMENT")
library.define("uniform(Tensor seed, SymInt[] size, *, ScalarType dtype) -> Tensor")
library.impl("uniform", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("tessera::uniform", _empty, lib=library)
uniform = torch.ops.tessera.uniform.default

declare("tessera.uniform", "computed random", zero=True, cost=per_element(COST))
