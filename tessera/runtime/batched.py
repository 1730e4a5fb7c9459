"""Cotangents that stand for many: `torch.autograd.grad(..., is_grads_batched=True)`, the vectorized Jacobians.

PyTorch runs a backward under vmap then. A compiled backward reads memory, not batched tensors, so it runs once a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

active = torch._C._are_functorch_transforms_active


def rows(gradients: Callable, ctx: object, cts: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of every row, batched as the cotangents are."""
    level = torch._C._functorch.maybe_current_level()
    apart = [torch._C._functorch._unwrap_batched(ct, level) for ct in cts]
    size = next((x.shape[dim] for x, dim in apart if dim is not None), None)
    with temporarily_pop_interpreter_stack():
        again = rows if active() else lambda f, c, xs: f(c, xs)
        if size is None:
            return again(gradients, ctx, cts)
        every = [again(gradients, ctx, [_row(x, dim, i) for x, dim in apart]) for i in range(size)]
        stacked = [None if column[0] is None else torch.stack(column) for column in zip(*every, strict=True)]
    return [None if x is None else torch._C._functorch._add_batch_dim(x, 0, level) for x in stacked]


def _row(x: torch.Tensor, dim: int | None, i: int) -> torch.Tensor:
    return x if dim is None else x.select(dim, i)
