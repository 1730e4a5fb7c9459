"""The GPU targets as an H200 has them, for tests that write or compile kernels without one."""

from __future__ import annotations

from tessera.machines import machine
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.cuda_tile.target import CudaTile
from tessera.tile.targets.triton.target import TritonTarget

H200 = machine("h200")
TRITON, CUDA_TILE = TritonTarget(H200), CudaTile(H200)


def propose(kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
    return TRITON.propose(kernel, sizes)
