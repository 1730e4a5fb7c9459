"""What stands between a region and its kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.ir.equation import Equation, Value


@dataclass(frozen=True)
class Around:
    """What stands around a kernel: all that a call of it needs to know."""

    inputs: tuple[Value, ...]  # of the region, in the order of the kernel's buffers
    stored: tuple[Value, ...]  # what the kernel writes, in the order of the buffers after those
    symbols: tuple[str, ...]
    tail: tuple[Equation, ...]  # views that give the region's outputs from what is stored or came in

    @property
    def buffers(self) -> tuple[Value, ...]:
        return (*self.inputs, *self.stored)
