"""Products of rows that lie group by group, each group with a matrix of its own.

    grouped_mm  rows[ends[g - 1] : ends[g]] @ stack[g], one below the other; rows behind the last end are zeros

transformers has an operator of this meaning, which is in a program only where transformers was imported. This one is
Tessera's, so that an artifact can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.ops.matmul import product_cost
from tessera.ops.op import declare

library = torch.library.Library("tessera", "FRAGMENT")
# The host reads where groups end.
library.define("grouped_mm(Tensor rows, Tensor stack, Tensor ends) -> Tensor", tags=(torch.Tag.data_dependent_output,))


def meaning(rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    out, start = _empty(rows, stack, ends).zero_(), 0
    for matrix, end in zip(stack, ends.tolist(), strict=True):
        if end > start:
            torch.mm(rows[start:end], matrix, out=out[start:end])
            start = end
    return out


def _empty(rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], stack.shape[2])


library.impl("grouped_mm", meaning, "CompositeExplicitAutograd")
torch.library.register_fake("tessera::grouped_mm", _empty, lib=library)
grouped_mm = torch.ops.tessera.grouped_mm.default
declare("tessera.grouped_mm", "matmul", cost=product_cost(0))
