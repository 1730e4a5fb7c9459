"""Memory: which tensors share it, who holds it, and its quickest allocation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.torch_internals.lookup import symbol

# As TorchInductor's programs allocate: half the cost of `torch.empty_strided`, whose arguments are parsed. Each takes a
# shape, strides and a dtype; the second allocates on the current device.
_ALLOCATE = "allocating the results of kernels"
empty_cpu: Callable[..., torch.Tensor] = symbol("torch._C._dynamo.guards._empty_strided_cpu", _ALLOCATE)
empty_cuda: Callable[..., torch.Tensor] = symbol("torch._C._dynamo.guards._empty_strided_cuda", _ALLOCATE)
lazy_clone: Callable[[torch.Tensor], torch.Tensor] = symbol("torch._lazy_clone", "fake tensors of symbolic sizes")
_use_count = symbol("torch._C._storage_Use_Count", "telling whether somebody holds a CUDA graph's result")


def storage_id(x: torch.Tensor) -> int:
    """The same for two tensors if and only if they share their memory; fake tensors have one too."""
    return x.untyped_storage()._cdata


def memory_of(x: object) -> int:
    """The same for two objects if they share memory; one that is no strided tensor has its own."""
    return storage_id(x) if isinstance(x, torch.Tensor) and x.layout is torch.strided else id(x)


def storage_uses(x: torch.Tensor) -> int:
    """How many hold the memory of this tensor."""
    return _use_count(x.untyped_storage()._cdata)
