"""What the tile compiler made of a region, or of many that share a launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tessera.ir.kernel import Kernel
from tessera.ir.trace import Trace
from tessera.ir.types import size_hint
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.from_trace.region import Lowered
from tessera.tile.from_trace.segments import Segment
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.base import CompiledKernel, Run


@dataclass(frozen=True, eq=False, kw_only=True)
class TileKernel(Kernel):
    body: Trace
    lowered: Lowered
    schedule: Schedule
    compiled: CompiledKernel | Run
    segments: tuple[Segment, ...] = ()  # where one launch runs many regions

    @property
    def tile(self) -> KernelOp:
        """The program in the tile dialect."""
        return self.lowered.kernel

    @property
    def text(self) -> str:
        """What the target compiled, as it can be read."""
        return self.compiled.source

    @property
    def origin(self) -> object:
        return self.lowered

    def examples(self) -> list[torch.Tensor]:
        return examples(self.lowered)


def examples(lowered: Lowered) -> list[torch.Tensor]:
    """Tensors to measure a kernel on. Zeros are valid indices, and no slower than other numbers."""
    tensors = []
    for v in lowered.buffers:
        shape, stride = ([size_hint(s) for s in sizes] for sizes in (v.shape, v.tensor.stride))
        tensors.append(torch.empty_strided(shape, stride, dtype=v.dtype, device=v.tensor.device).zero_())
    return tensors
