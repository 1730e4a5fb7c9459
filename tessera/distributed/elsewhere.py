"""Models that PyTorch itself has laid out on ranks: by DistributedDataParallel, by `fully_shard`, as DTensors.

In: a model. Out: who has laid it out, why its training step is not one program, and what `tessera.shard` would gain.
Such models run as they do under `torch.compile`: their hooks, and the dispatch of DTensors, stay what they are.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tessera.distributed.sharding import sharding_of

FSDP = "torch.distributed.fsdp"


@dataclass(frozen=True)
class Elsewhere:
    who: str
    reason: str  # why a step is not one program
    gain: str  # what `tessera.shard` would do

    def __str__(self) -> str:
        return f"{self.who}: {self.reason}; {self.gain}"


DDP = Elsewhere(
    "DistributedDataParallel",
    "hooks of autograd sum the gradients",
    "tessera.shard(model.module, mesh, 'ddp') makes the sums equations of one step, joined, overlapped and told here",
)
FULLY_SHARD = Elsewhere(
    "fully_shard",
    "hooks gather the weights and scatter the gradients, and part the model into graphs",
    "tessera.shard(model, mesh, 'zero3') makes gathers and sums equations of one step, overlapped and told here",
)
DTENSORS = Elsewhere(
    "DTensors",
    "DTensor's dispatch runs every operator",
    "tessera.shard(model, mesh, plan) leaves the weights where they are and compiles one rank's whole program",
)


def elsewhere(model: object) -> Elsewhere | None:
    """Who else has laid a model out on ranks; None where nobody has, or `tessera.shard` did."""
    if not isinstance(model, nn.Module) or sharding_of(model) is not None:
        return None
    wrapped = _fsdp_classes()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return DDP
        if isinstance(module, wrapped):
            return FULLY_SHARD
    return DTENSORS if any(isinstance(p, DTensor) for p in model.parameters()) else None


def _fsdp_classes() -> tuple[type, ...]:
    """Nobody has wrapped a module in what was never imported."""
    fsdp = sys.modules.get(FSDP)
    return () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
