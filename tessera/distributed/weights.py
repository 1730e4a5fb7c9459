"""Weights on a mesh: a model's parameters become DTensors in place.

In: a model, where its weights shall lie, a mesh of PyTorch's. Out: the same model, whose parameters hold this rank's
parts. What rank 0 has counts: whole weights are sent from there before they are cut, so that ranks that were seeded
differently start alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tessera.distributed import watch
from tessera.distributed.carried import moved
from tessera.distributed.dtensors import as_dtensor, from_dtensor
from tessera.ir.dist import chunk, padded
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.record import user_line
from tessera.ir.strides import resolved
from tessera.ir.types import TensorType, contiguous_strides, type_of
from tessera.util.errors import InputError

Replaced = dict[nn.Parameter, nn.Parameter]  # the new parameter for each old one


def whole_type(x: Tensor) -> TensorType:
    """The type of a whole weight, of which a DTensor is a part."""
    if not isinstance(x, DTensor):
        type_ = type_of(x)
        assert isinstance(type_, TensorType)
        return type_
    device = x.to_local().device
    if device.type == "meta":  # another stage of a pipeline holds it
        kind = x.device_mesh.device_type
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return TensorType(x.dtype, tuple(x.shape), contiguous_strides(tuple(x.shape)), device)


def local_of(x: Tensor) -> Tensor:
    """This rank's part."""
    return x.to_local() if isinstance(x, DTensor) else x


class Named:
    """A model's parameters, or buffers, by name: read where they are, without a walk through its modules."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        """`kind`: "_parameters" or "_buffers"."""
        names = dict(model.named_parameters() if kind == "_parameters" else model.named_buffers())
        self._found: list[tuple[str, dict, str]] = []
        for prefix, module in model.named_modules():
            for key in getattr(module, kind):
                name = f"{prefix}.{key}" if prefix else key
                if name in names:
                    self._found.append((name, getattr(module, kind), key))

    def __call__(self) -> dict[str, Any]:
        return {name: held[key] for name, held, key in self._found}


def whole_of(x: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    if not isinstance(x, DTensor):
        return x
    if (carried := moved(x.to_local())).dtype == x.dtype or x.dtype.is_complex:
        return x.full_tensor()
    there = DTensor.from_local(carried, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    return there.full_tensor().view(x.dtype)


def own_part(x: Tensor, placement: Placement, device_mesh: DeviceMesh) -> Tensor:
    """A rank's part of a tensor that is whole on it."""
    for dim, axes in enumerate(placement.splits):
        for axis in axes:
            ranks = placement.mesh.size(axis)
            step = chunk(x.shape[dim], ranks)
            x = padded(x, dim, ranks).narrow(dim, device_mesh.get_local_rank(axis) * int(step), int(step))
    return x.clone(memory_format=torch.contiguous_format)


def placement_of(x: DTensor, mesh: Mesh) -> Placement:
    return from_dtensor(x.placements, mesh, tuple(x.shape))


def distribute(model: nn.Module, placements: Mapping[str, Placement], device_mesh: DeviceMesh) -> Replaced:
    """Replace a model's parameters; gives the new one for each old. One that two modules share is shared again."""
    new: Replaced = {}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            continue
        if p.grad is not None:
            raise InputError(f"shard: expected a weight without a gradient, got one in {name}.grad; zero_grad first")
        new[p] = distributed_parameter(p, placements[name], device_mesh)
        p._tessera_name, p.__class__ = name, _Replaced  # type: ignore[attr-defined]
    exchange(model, new)
    with torch.no_grad(), watch.waiting("buffers of rank 0 did not come"):
        for buffer in model.buffers():
            came = resolved(buffer).contiguous()
            dist.broadcast(moved(came), 0)
            if came is not buffer:
                buffer.copy_(came)
    return new


def distributed_parameter(p: nn.Parameter, placement: Placement, device_mesh: DeviceMesh) -> nn.Parameter:
    """A rank's part of what rank 0 holds."""
    with torch.no_grad():
        whole = resolved(p.detach()).clone(memory_format=torch.contiguous_format)
        with watch.waiting("weights of rank 0 did not come"):
            dist.broadcast(moved(whole), 0)
        part = as_dtensor(own_part(whole, placement, device_mesh), placement, device_mesh)
        return nn.Parameter(part, requires_grad=p.requires_grad)


def exchange(model: nn.Module, new: Replaced) -> None:
    """Put new parameters in the place of old ones, wherever modules hold them."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if p in new:
                setattr(module, name, new[p])


def adopt(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Weights that lie on some axes of a mesh already lie on the whole of it, the same along the other axes."""
    names = device_mesh.mesh_dim_names or ()
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor) or p.device_mesh == device_mesh:
            continue
        words = dict(zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=False))
        if not words or not set(words) <= set(names):
            raise InputError(f"shard: expected {name} on axes of the mesh {names}, got it on {p.device_mesh}")
        there = [words.get(axis, Replicate()) for axis in names]
        local, shape, stride = p.to_local().detach(), p.shape, p.stride()
        part = DTensor.from_local(local, device_mesh, there, run_check=False, shape=shape, stride=stride)
        torch.utils.swap_tensors(p, nn.Parameter(part, requires_grad=p.requires_grad))


def move(model: nn.Module, placements: Mapping[str, Placement], device_mesh: DeviceMesh) -> None:
    """Bring weights that are DTensors elsewhere. They stay the same objects, so that optimizers go on owning them."""
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        if placement_of(p, placements[name].mesh) == placements[name]:
            continue
        with torch.no_grad():
            part = own_part(whole_of(p), placements[name], device_mesh)
            there = nn.Parameter(as_dtensor(part, placements[name], device_mesh), requires_grad=p.requires_grad)
        torch.utils.swap_tensors(p, there)


def leave(model: nn.Module, absent: Collection[str]) -> None:
    """Give up the memory of weights that other ranks hold. They stay the same parameters, on the meta device."""
    for name, p in model.named_parameters():
        if name in absent and not local_of(p).is_meta:
            torch.utils.swap_tensors(p, nn.Parameter(without_memory(p), requires_grad=p.requires_grad))


def without_memory(x: Tensor) -> DTensor:
    """The same, on the meta device."""
    assert isinstance(x, DTensor)
    part = torch.empty_like(x.to_local(), device="meta")
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


# --- optimizers of the old parameters -------------------------------------------------------------


class _Replaced(nn.Parameter):
    """A parameter in whose place another stands. An optimizer that was made before has it, and would go by it as by one
    that has no gradient: the first to ask for that is told."""

    _tessera_name: str

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        raise _made_before([self], "one")


def check_owner(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that was made before its parameters were replaced: it would train none of the new."""
    old = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, _Replaced)]
    if old:
        raise _made_before(old, type(optimizer).__name__)


def _made_before(old: list[_Replaced], optimizer: str) -> InputError:
    names, more = ", ".join(p._tessera_name for p in old[:2]), f" and {len(old) - 2} more" if len(old) > 2 else ""
    return InputError(
        f"{user_line()}: expected an optimizer of the parameters that tessera.shard made, got {optimizer} made before "
        f"it, of {names}{more} as it was; say torch.optim.AdamW(model.parameters(), …) after tessera.shard"
    )


def follow(optimizer: torch.optim.Optimizer, new: Replaced) -> None:
    """An optimizer of the old parameters is one of the new."""
    if new and any(p in optimizer.state for p in new):
        raise InputError(
            f"{user_line()}: expected an optimizer that has made no step yet; make it, and load its state, after shard"
        )
    for group in optimizer.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
