"""Collectives as functions, and parts of DTensor that have no public name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
_AT_ONCE = "beginning a collective without the checks that PyTorch's own functions make again at every call"
_AllgatherOptions = symbol("torch.distributed.distributed_c10d.AllgatherOptions", _AT_ONCE)
_ReduceScatterOptions = symbol("torch.distributed.distributed_c10d.ReduceScatterOptions", _AT_ONCE)
_AllreduceOptions = symbol("torch.distributed.distributed_c10d.AllreduceOptions", _AT_ONCE)
_AllToAllOptions = symbol("torch.distributed.distributed_c10d.AllToAllOptions", _AT_ONCE)
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


def _elsewhere(*args: Any, **kwargs: Any) -> Any:
    return _tessera_region(*args, **kwargs)  # type: ignore[name-defined] # noqa: F821 - a global of the other module


@contextmanager
def instead_of_local_map(region: Callable) -> Iterator[None]:
    """Meanwhile a call of a function that `local_map` wrapped calls `region` with what it was wrapped with, by name:
    func, out_placements, in_placements, device_mesh, …; args; kwargs."""
    owner: Any = sys.modules.get(_LOCAL_MAP)
    if owner is None:  # nobody has wrapped a function
        yield
        return
    wrapped = owner._local_map_wrapped  # others hold this very function, so it stays the same object
    signature, theirs = inspect.signature(wrapped), wrapped.__code__
    owner._tessera_region = lambda *args, **kwargs: region(**signature.bind(*args, **kwargs).arguments)
    wrapped.__code__ = _elsewhere.__code__
    try:
        yield
    finally:
        wrapped.__code__ = theirs
        del owner._tessera_region


def part_of(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, beside autograd: `to_local` would make a node of its graph."""
    return getattr(x, "_local_tensor", x)  # importing DTensor takes long, and SymPy


def deadline_of(group: object, device: torch.device) -> timedelta:
    """After which a collective of this group gives up."""
    return group._get_backend(device).options._timeout  # type: ignore[attr-defined]


class Group:
    """Collectives of one process group. Each begins and gives what waits for it: its `wait` returns once the result may
    be read, on a GPU by whatever is launched after it. Until then operand and result stay as they are. They go to the
    backend for the operand's device at once: PyTorch's dispatcher would only look it up again."""

    def __init__(self, group: Any) -> None:
        self._backends = _Backends(group)
        self._gathers, self._exchanges = _asynchronous(_AllgatherOptions()), _asynchronous(_AllToAllOptions())
        self._reduces, self._scatters = {}, {}
        for how, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN)):
            self._reduces[how] = _asynchronous(_AllreduceOptions())
            self._scatters[how] = _asynchronous(_ReduceScatterOptions())
            self._reduces[how].reduceOp = self._scatters[how].reduceOp = op

    def all_gather(self, out: Tensor, x: Tensor) -> Any:
        return self._backends[x.device]._allgather_base(out, x, self._gathers)

    def reduce_scatter(self, out: Tensor, x: Tensor, how: str = "sum") -> Any:
        return self._backends[x.device]._reduce_scatter_base(out, x, self._scatters[how])

    def all_reduce(self, x: Tensor, how: str) -> Any:
        """In place."""
        return self._backends[x.device].allreduce([x], self._reduces[how])

    def all_to_all(self, out: Tensor, x: Tensor, take: list[int], give: list[int]) -> Any:
        """Rows that come from each rank, and that go to each; none named: as many to and from all."""
        return self._backends[x.device].alltoall_base(out, x, take, give, self._exchanges)


class _Backends(dict[torch.device, Any]):
    """A group's backends, each looked up once."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group

    def __missing__(self, device: torch.device) -> Any:
        backend = self[device] = self._group._get_backend(device)
        return backend


def _asynchronous(options: Any) -> Any:
    options.asyncOp = True
    return options
