"""`tessera::uniform_part`, a box out of the numbers of `tessera::uniform`.

In: a seed, the sizes of the box, those of the whole, and where the box begins along each dimension (None: at 0). Out:
the numbers that `uniform` has there, bit for bit. Ranks of a mesh draw their parts with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.ir.types import Size
from tessera.ops.families import per_element
from tessera.ops.op import declare
from tessera.ops.uniform import BITS, COST, check_seed
from tessera.util.philox import block


def _draw_part(
    seed: Tensor, size: Sequence[Size], whole: Sequence[Size], starts: Sequence[Tensor | None], *, dtype: torch.dtype
) -> Tensor:
    check_seed(seed, dtype)
    place = torch.zeros([1] * len(size), dtype=torch.int64, device=seed.device)
    for dim, (here, there, start) in enumerate(zip(size, whole, starts, strict=True)):
        along = torch.arange(int(here), device=seed.device)
        along = along if start is None else along + start
        place = place * int(there) + along.reshape([-1 if d == dim else 1 for d in range(len(size))])
    words = torch.stack(block(seed.reshape(-1)[0], place // 4), -1).gather(-1, (place % 4).unsqueeze(-1)).squeeze(-1)
    return (words >> (32 - BITS[dtype])).to(dtype) * 2.0 ** -BITS[dtype]


def _empty(
    seed: Tensor, size: Sequence[Size], whole: Sequence[Size], starts: Sequence[Tensor | None], *, dtype: torch.dtype
) -> Tensor:
    return seed.new_empty(list(size), dtype=dtype)


library = torch.library.Library("tessera", "FRAGMENT")
library.define(
    "uniform_part(Tensor seed, SymInt[] size, SymInt[] whole, Tensor?[] starts, *, ScalarType dtype) -> Tensor"
)
library.impl("uniform_part", _draw_part, "CompositeExplicitAutograd")
torch.library.register_fake("tessera::uniform_part", _empty, lib=library)
uniform_part = torch.ops.tessera.uniform_part.default

declare("tessera.uniform_part", "computed random", zero=True, cost=per_element(COST))
