"""The reference interpreter as a target, so that the tile executor is tested apart from any machine's code.

Which products it takes is said for one machine that is described, not for the one that the tests run on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hosts import SKYLAKE

from tessera.tile.dialect import interp
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.cpu.product import no_product


class _Kernel:
    def __init__(self, kernel: KernelOp) -> None:
        self.kernel, self.source = kernel, str(kernel)

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int]) -> None:
        interp.run(self.kernel, tensors, symbols)


class Reference:
    name = "reference"

    def __init__(self, refusal: str = "") -> None:
        self.compiled, self.refusal = 0, refusal

    def propose(self, kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
        return [Schedule()]

    def compile(self, kernel: KernelOp, schedule: Schedule) -> _Kernel:
        self.compiled += 1
        return _Kernel(kernel)

    def no_sums_over_rows(self, row: int | None) -> str:
        return self.refusal

    def no_product(self, rows: int, columns: int, depth: int) -> str:
        return self.refusal or no_product(rows, columns, depth, SKYLAKE)
