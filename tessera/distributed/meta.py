"""Models on the meta device: weights that have sizes and no memory are made one module at a time.

In: a model, some of whose weights are on `meta`, and where they shall lie. Out: the same model with this rank's parts,
initialised as the modules' own `reset_parameters` does it. At no time is more than one module whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tessera.distributed.weights import distributed_parameter, exchange
from tessera.ir.placement import Placement
from tessera.util.errors import InputError


def is_meta(model: nn.Module) -> bool:
    return any(x.is_meta for x in (*model.parameters(), *model.buffers()))


def materialise(model: nn.Module, placements: Mapping[str, Placement], device_mesh: DeviceMesh) -> None:
    names, device = {p: name for name, p in model.named_parameters()}, device_mesh.device_type
    for path, module in model.named_modules():
        params = [(key, p) for key, p in module.named_parameters(recurse=False) if p.is_meta]
        buffers = [(key, b) for key, b in module.named_buffers(recurse=False) if b.is_meta]
        if not params and not buffers:
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise InputError(
                f"shard: {path or type(model).__name__} has weights on the meta device and no reset_parameters() that "
                f"makes them; expected one in {type(module).__name__}, or a model with its weights in memory"
            )
        for key, b in buffers:
            setattr(module, key, torch.empty_like(b, device=device))
        whole = {p: nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad) for _, p in params}
        for key, p in params:
            setattr(module, key, whole[p])
        reset()
        parts = {p: distributed_parameter(q, placements[names[p]], device_mesh) for p, q in whole.items()}
        exchange(model, parts | {whole[p]: part for p, part in parts.items()})
