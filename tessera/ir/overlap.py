"""Writes that read the memory they write: eager PyTorch refuses many, and an operator of a user's sees its own writes.

In: an operator, the fake tensors that it writes, and those that it reads. A functional program would compute something
else than eager, or something where eager raises an error; so the call is not recorded, and the graph runs eagerly.
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


def check_overlap(
    func: OpOverload, targets: Sequence[torch.Tensor], read: Sequence[torch.Tensor], opaque: bool
) -> None:
    """Refuse a call that reads some of the memory that it writes, or writes some of it twice. Sizes that are symbols
    count as what they are now. `opaque`: nobody knows in which order it reads and writes."""
    by_memory: dict[int, list[tuple[torch.Tensor, bool]]] = {}
    for x in read:
        by_memory.setdefault(memory_of(x), []).append((x, opaque))
    for target in targets:
        beside = by_memory.setdefault(memory_of(target), [])
        if any(_meet(target, x) if exact else _overlap(target, x, op_name(func) in _PLACES) for x, exact in beside):
            raise CaptureError(f"{func} reads or writes again some of the memory that it writes; clone it first")
        beside.append((target, True))


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


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they have an element in common, or may have."""
    (start, *_), (other, *_) = _place(a), _place(b)
    dims, others = _dims(a), _dims(b)
    if any(size == 0 for _, size in (*dims, *others)):
        return False
    if dims == others and a.element_size() == b.element_size():  # such as keys and values that lie in turn
        return _reaches(abs(start - other) // a.element_size(), dims)
    end, other_end = (
        at + (1 + sum(step * (size - 1) for step, size in d)) * x.element_size()
        for at, d, x in ((start, dims, a), (other, others, b))
    )
    return start < other_end and other < end


def _dims(x: torch.Tensor) -> list[tuple[int, int]]:
    """Strides and sizes, the longest stride first."""
    dims = zip(map(size_hint, x.stride()), map(size_hint, x.shape), strict=True)
    return sorted(((step, size) for step, size in dims if size != 1), reverse=True)


def _reaches(distance: int, dims: list[tuple[int, int]]) -> bool:
    """Whether two elements of a tensor may lie so far apart."""
    if not dims:
        return distance == 0
    (step, size), rest = dims[0], dims[1:]
    if step <= sum(s * (n - 1) for s, n in rest):  # windows
        return True
    fits = (distance // step, distance // step + 1)
    return any(k < size and _reaches(abs(distance - k * step), rest) for k in fits)
