"""Writes that read the memory they write, in another order: eager PyTorch refuses them.

In: an operator, the fake tensors that it writes, and those that it reads. A functional program would compute something
where eager raises an error, so such a call is not recorded: the graph that holds it runs eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.ir.types import is_dense, size_hint
from tessera.torch_internals.memory import memory_of
from tessera.torch_internals.operators import OpOverload, op_name
from tessera.util.errors import CaptureError
from tessera.util.names import names

# These go from place to place by an index or a list: what they write may not be their source at all.
_PLACES = names(
    "index_put_ index_add_ index_copy_ index_reduce_ scatter_ scatter_add_ scatter_reduce_ put_ gather index_select cat"
)


def check_overlap(func: OpOverload, targets: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
    """Refuse a call that reads some of the memory that it writes. Sizes that are symbols count as what they are now."""
    by_memory: dict[int, list[torch.Tensor]] = {}
    for x in read:
        by_memory.setdefault(memory_of(x), []).append(x)
    for target in targets:
        if any(_overlap(target, x, op_name(func) in _PLACES) for x in by_memory.get(memory_of(target), ())):
            raise CaptureError(f"{func} reads some of the memory that it writes; clone what it reads first")


def _overlap(a: torch.Tensor, b: torch.Tensor, whole: bool) -> bool:
    """As PyTorch decides it, which asks tensors with gaps nothing; `whole`: the very same elements count, too."""
    (start, end, stride), (other_start, other_end, other_stride) = _place(a), _place(b)
    if not all(is_dense(x.shape, x.stride()) for x in (a, b)) or start == end or other_start == other_end:
        return False
    if (start, end, stride) == (other_start, other_end, other_stride):
        return whole
    return start < other_end and other_start < end


def _place(x: torch.Tensor) -> tuple[int, int, list[int]]:
    """Its first byte and the one after its last, where it has no gaps; its strides."""
    start = size_hint(x.storage_offset()) * x.element_size()
    return start, start + size_hint(x.numel()) * x.element_size(), [size_hint(s) for s in x.stride()]
