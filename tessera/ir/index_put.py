"""The type rule of `index_put`: whether indices and values fit the tensor.

In: a call of `index_put` on fake tensors. Out: its result. PyTorch's rule looks at nothing but the tensor, and leaves
errors to the kernel. A program may drop the call, as a write to what nobody reads, and eager's error must come all the
same. What depends on contents is left to the kernel: how much a mask selects, and whether indices lie within bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.ir.types import SYMBOLIC, size_hint
from tessera.util.errors import IndexingError

_op = torch.ops.aten.index_put.default


def index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    tensors = [x, values, *(i for i in indices if i is not None)]
    if not any(map(_sizes_unknown, tensors)):
        try:
            _check(x, indices, values)
        except (RuntimeError, IndexError) as error:
            raise IndexingError(str(error)) from error
    return _op(x, indices, values, accumulate)


def _check(x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor) -> None:
    shown = torch.ops.aten.index.Tensor(x, _without_masks(x, indices))
    if not any(_is_mask(i) for i in indices):
        values.expand(shown.shape)


def _without_masks(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Each mask as what selects one element of the dimensions that it covers."""
    plain: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or not _is_mask(index):
            plain.append(index)
            continue
        covered = x.shape[len(plain) : len(plain) + index.ndim]
        if len(covered) != index.ndim or any(a != b for a, b in zip(covered, index.shape, strict=True)):
            raise IndexError(
                f"a mask of shape {list(index.shape)} at dimension {len(plain)} does not fit what it indexes, "
                f"a tensor of shape {list(x.shape)}"
            )
        plain += [index.new_empty((1,), dtype=torch.int64)] * index.ndim
    return plain


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _sizes_unknown(x: torch.Tensor) -> bool:
    """Some size is known only when the program runs."""
    return any(isinstance(n, SYMBOLIC) and size_hint(n, -1) == -1 for n in x.shape)
