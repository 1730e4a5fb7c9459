"""Copies of arguments: the same strides, the same memory shared between them, leaves of their own.

Eager and the compiled program each get a copy, since either may write into what it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.torch_internals import pytree
from tessera.torch_internals.autograd import lazy_neg
from tessera.torch_internals.memory import storage_id


def copied(tree: object, dtype: torch.dtype | None = None) -> object:
    """A copy of every tensor; `dtype`: floating-point ones of this precision (complex ones of the like)."""
    memory: dict[int, torch.UntypedStorage] = {}
    return pytree.tree_map_only(Tensor, lambda t: _copied(t, memory, dtype), tree)


def _copied(t: Tensor, memory: dict[int, torch.UntypedStorage], dtype: torch.dtype | None) -> Tensor:
    with torch.no_grad():
        copy = _contents(t.detach(), memory, dtype)
    return copy.requires_grad_(t.requires_grad) if copy.is_floating_point() or copy.is_complex() else copy


def _contents(t: Tensor, memory: dict[int, torch.UntypedStorage], dtype: torch.dtype | None) -> Tensor:
    target = wider(t.dtype, dtype)
    if t.layout is not torch.strided or t.is_quantized:
        return t.clone() if target == t.dtype else t.to(target)
    if t.is_conj():
        return _contents(t.conj(), memory, dtype).conj()
    if t.is_neg():
        return lazy_neg(_contents(lazy_neg(t), memory, dtype))
    if target != t.dtype:  # a dense copy of the same order of dimensions
        return t.to(target)
    storage = t.untyped_storage()
    if storage_id(t) not in memory:
        memory[storage_id(t)] = storage.clone()
    view = torch.empty(0, dtype=t.dtype, device=t.device)
    return view.set_(memory[storage_id(t)], t.storage_offset(), t.shape, t.stride())  # type: ignore[call-overload]


def wider(have: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    if wanted is None or not (have.is_floating_point or have.is_complex):
        return have
    return torch.complex128 if have.is_complex and wanted == torch.float64 else have if have.is_complex else wanted
