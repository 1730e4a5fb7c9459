"""Writes a kernel as cuTile Python: attention, a sequential axis, or anything else, each by its own emitter."""

from __future__ import annotations

from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.schedule import Schedule, inner_axis
from tessera.tile.targets.cuda_tile.emit import Emitter
from tessera.tile.targets.cuda_tile.flash import Flash
from tessera.tile.targets.cuda_tile.sequential import Sequential


def write(kernel: KernelOp, schedule: Schedule) -> str:
    """The module's text."""
    if inner_axis(kernel) is not None:
        return Flash(kernel, schedule).module()
    return (Emitter if kernel.sequential_axis is None else Sequential)(kernel, schedule).module()
