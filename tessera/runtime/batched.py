"""Cotangents that stand for many: `torch.autograd.grad(..., is_grads_batched=True)`, the vectorized Jacobians.

PyTorch runs a backward on batched tensors then. A compiled backward reads memory, so it runs once for every row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tessera.torch_internals.dispatch import is_key_included, parse_key
from tessera.torch_internals.functorch import (
    add_batch_dim,
    is_legacy_batched,
    remove_batch_dim,
    vmap_level_down,
    vmap_level_up,
)

active = functools.partial(is_key_included, parse_key("VmapMode"))


def rows(gradients: Callable, ctx: object, cts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """The gradients of every row, batched as the cotangents are."""
    with _outside() as level:
        inner = functools.partial(rows, gradients) if active() else gradients
        batches = [remove_batch_dim(ct, level, 1, 0) if is_legacy_batched(ct) else None for ct in cts]
        size = next((len(b) for b in batches if b is not None), None)
        if size is None:
            return inner(ctx, cts)
        kept, given = _Kept(ctx), list(zip(cts, batches, strict=True))
        every = [inner(kept, [ct if b is None else b[i] for ct, b in given]) for i in range(size)]
        stacked = [None if column[0] is None else torch.stack(column) for column in zip(*every, strict=True)]
        return [None if x is None else add_batch_dim(x, 0, level) for x in stacked]


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
    level = vmap_level_down() + 1
    try:
        yield level
    finally:
        vmap_level_up()
