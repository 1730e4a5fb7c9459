"""The target itself: `compile` and `propose`, put together from the other files of this folder."""

from __future__ import annotations

from collections.abc import Callable

from tessera.machines import Machine
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.base import CompiledKernel
from tessera.tile.targets.triton import shim
from tessera.tile.targets.triton.batch import BatchLauncher
from tessera.tile.targets.triton.launch import launcher, load, save
from tessera.tile.targets.triton.propose import propose


class TritonTarget:
    name = "triton"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def compile(self, kernel: KernelOp, schedule: Schedule) -> CompiledKernel:
        return launcher(kernel, schedule)

    def about(self) -> str:
        import triton

        return f"triton {triton.__version__} {shim.interpreting()}"

    def save(self, compiled: CompiledKernel) -> dict | None:
        return save(compiled)

    def load(self, data: dict, kernel: Callable[[], KernelOp]) -> CompiledKernel | None:
        return load(data, kernel)

    def batch(self, kernel: KernelOp, schedule: Schedule) -> BatchLauncher:
        """A launcher for many segments of a flat kernel at once."""
        return BatchLauncher(kernel, schedule)

    def save_batch(self, run: object, longest: int) -> dict | None:
        return run.saved(longest) if isinstance(run, BatchLauncher) else None

    def load_batch(self, data: dict, kernel: Callable[[], KernelOp]) -> BatchLauncher:
        return BatchLauncher.restored(data, kernel)

    def propose(self, kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
        return propose(kernel, sizes, self.machine)

    def no_sums_over_rows(self, row: int | None) -> str:
        if row is None:
            return "how many registers sums over its rows take is not known before it runs"
        return ""

    def no_product(self, rows: int, columns: int, depth: int) -> str:
        return ""
