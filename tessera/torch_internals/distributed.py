"""Collectives as functions, and parts of DTensor that have no public name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch

from tessera.torch_internals.lookup import symbol

_WHY = "running collectives as functions that give new tensors"
all_reduce = symbol("torch.ops._c10d_functional.all_reduce.default", _WHY)
all_gather_into_tensor = symbol("torch.ops._c10d_functional.all_gather_into_tensor.default", _WHY)
reduce_scatter_tensor = symbol("torch.ops._c10d_functional.reduce_scatter_tensor.default", _WHY)
all_to_all_single = symbol("torch.ops._c10d_functional.all_to_all_single.default", _WHY)
broadcast = symbol("torch.ops._c10d_functional.broadcast.default", _WHY)
wait_tensor = symbol("torch.ops._c10d_functional.wait_tensor.default", _WHY)
group_of = symbol(
    "torch.distributed.distributed_c10d._resolve_process_group",
    "which rank of its group this one is, by the group's name",
)
StridedShard = symbol(
    "torch.distributed.tensor.placement_types._StridedShard",
    "a dimension of a DTensor that two axes split, the later one first",
)
default_store = symbol(
    "torch.distributed.distributed_c10d._get_default_store", "the store that all ranks reach, to tell where each one is"
)
set_deadline = symbol(
    "torch.distributed.distributed_c10d._set_pg_timeout", "one deadline for all groups of a mesh, which PyTorch makes"
)
_LOCAL_MAP = "torch.distributed.tensor.experimental._func_map"


@contextmanager
def noticing_local_map(notice: Callable[[], NoReturn]) -> Iterator[None]:
    """Meanwhile a function that `local_map` wrapped calls `notice` when it takes its arguments apart."""

    class Noticing:
        def __getattr__(self, name: str) -> NoReturn:
            notice()

    owner: Any = sys.modules.get(_LOCAL_MAP)
    if owner is None:  # nobody has wrapped a function
        yield
        return
    theirs, owner.pytree = owner.pytree, Noticing()
    try:
        yield
    finally:
        owner.pytree = theirs


def deadline_of(group: object, device: torch.device) -> timedelta:
    """After which a collective of this group gives up."""
    return group._get_backend(device).options._timeout  # type: ignore[attr-defined]
