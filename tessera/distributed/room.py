"""Whether what a rank shall hold fits its device, asked before anything is made there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tessera.ir.placement import Placement
from tessera.machines import machine_of
from tessera.util.errors import InputError


def check_room(total: float, told: str, device: torch.device) -> None:
    """Refuse what cannot fit: `told` says what takes how much."""
    if device.type != "cuda":  # a host may swap
        return
    here = machine_of(device)
    if total > here["memory"]:
        raise InputError(
            f"expected a plan that fits {here.name}, which has {in_gb(here['memory'])}; a rank needs {in_gb(total)}: "
            f"{told}"
        )


def in_gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def bytes_of(weights: Iterable[tuple[nn.Parameter, Placement]]) -> int:
    """What a rank's parts take."""
    total = 0
    for p, placement in weights:
        count = 1
        for size in placement.local_shape:
            count *= int(size)
        total += count * p.element_size()
    return total
