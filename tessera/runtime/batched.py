"""Cotangents that stand for many: `torch.autograd.grad(..., is_grads_batched=True)`, the vectorized Jacobians.

PyTorch runs a backward on batched tensors then. A compiled backward reads memory, so it runs once for every row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

active = functools.partial(torch._C._dispatch_tls_is_dispatch_key_included, torch._C._parse_dispatch_key("VmapMode"))
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def rows(gradients: Callable, ctx: object, cts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """The gradients of every row, batched as the cotangents are."""
    with _outside() as level:
        inner = functools.partial(rows, gradients) if active() else gradients
        batches = [torch._remove_batch_dim(ct, level, 1, 0) if _is_batched(ct) else None for ct in cts]
        size = next((len(b) for b in batches if b is not None), None)
        if size is None:
            return inner(ctx, cts)
        kept, given = _Kept(ctx), list(zip(cts, batches, strict=True))
        every = [inner(kept, [ct if b is None else b[i] for ct, b in given]) for i in range(size)]
        stacked = [None if column[0] is None else torch.stack(column) for column in zip(*every, strict=True)]
        return [None if x is None else torch._add_batch_dim(x, 0, level) for x in stacked]


class _Kept:
    """A context whose saved tensors are read more than once. Autograd lets go of them after the last row."""

    def __init__(self, ctx: object) -> None:
        self.ctx = ctx

    def __getattr__(self, name: str) -> object:
        return getattr(self.ctx, name)

    def maybe_clear_saved_tensors(self) -> None:
        pass


@contextmanager
def _outside() -> Iterator[int]:
    """As if the innermost batch were not there; gives its level."""
    level = torch._C._vmapmode_decrement_nesting() + 1
    try:
        yield level
    finally:
        torch._C._vmapmode_increment_nesting()
