"""Copies with other strides, or of what is computed as it is read; the operator that makes one where a tensor lies
otherwise than a trace says."""

from __future__ import annotations

import torch

from tessera.ir.equation import Special


def resolved(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its memory holds what it does; a copy where it is conjugated or negated as it is read."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def with_strides(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor itself where it lies so, otherwise a copy that does. Strides of dimensions of one element, or of no
    elements at all, tell nothing."""
    if not x.numel() or all(a == b or size == 1 for a, b, size in zip(x.stride(), stride, x.shape, strict=True)):
        return x
    return copied(x, stride)


def copied(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The same numbers in memory of their own, with these strides; those that one address shows are copied once."""
    if 0 not in stride:
        return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
    once = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
    return torch.empty_strided(once.shape, stride, dtype=x.dtype, device=x.device).copy_(once).expand(x.shape)


def laid_out(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The same tensor where it lies as said, a copy that does so otherwise."""
    if x.stride() == stride:
        return x
    if any(step == 0 != own and size > 1 for size, own, step in zip(x.shape, x.stride(), stride, strict=True)):
        raise RuntimeError(f"expected strides {stride}, got {x.stride()}: a wrong type")
    return with_strides(x, stride)


LAID_OUT = Special("laid_out", laid_out)
