"""The CUDA Tile target: NVIDIA's tile compiler, by way of readable cuTile Python.

`compile` emits and checks the text at once; binaries are made when a kernel is first called, for the GPU it is called
on, or ahead of time with `build`, which needs no GPU. `propose` gives schedules whose tiles fit into registers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tessera.machines import Machine
from tessera.tile.dialect import interp
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.rewrites.offline import without_reduce_exp
from tessera.tile.rewrites.split_sequential import split
from tessera.tile.schedules.cost import axis_sizes
from tessera.tile.schedules.limits import Limits
from tessera.tile.schedules.schedule import Schedule, reduced_axis
from tessera.tile.targets.cuda_tile import driver, toolchain
from tessera.tile.targets.cuda_tile.arrays import Arrays, Variant, arrays, place, variant
from tessera.tile.targets.cuda_tile.emit import blocks_of, programs_of
from tessera.tile.targets.cuda_tile.propose import longest_summed_row, of_halves, propose
from tessera.tile.targets.cuda_tile.write import write
from tessera.tile.targets.pair import Pair
from tessera.util.errors import OptionError

ALIGNED = Variant(aligned=True)  # what tensors of PyTorch's own allocator nearly always are


@dataclass
class CudaTileKernel:
    """A kernel with its text; binaries and loaded functions are filled in as they are needed."""

    kernel: KernelOp
    schedule: Schedule
    source: str
    arrays: Arrays
    functions: dict[tuple[torch.device, Variant], driver.Function] = field(default_factory=dict)

    def build(self, arch: str, assume: Variant = ALIGNED) -> bytes:
        """The binary for an architecture such as "sm_90"; kept on disk for machines that cannot make it."""
        return toolchain.binary(self.kernel, self.source, self.arrays, assume, arch)

    def resources(self, arch: str, assume: Variant = ALIGNED) -> toolchain.Resources:
        return toolchain.resources(self.build(arch, assume))

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int]) -> None:
        values = {s.data: int(n) for s, n in zip(self.kernel.symbol_names, symbols, strict=True)}
        sizes = axis_sizes(self.kernel, values)
        programs = self.programs(sizes)
        if programs == 0:
            return
        if 0 in sizes.values():
            # A tile of an empty array may not be loaded; such a call has nothing to be fast at.
            interp.run(self.kernel, tensors, symbols)
            return
        self._check(sizes)
        placed = [place(a, tensors[a.buffer].data_ptr(), sizes, values) for a in self.arrays.all]
        chosen = variant(self.arrays.all, placed)
        function = self._function(tensors[0].device, chosen)
        function.launch(programs, driver.pack(placed, symbols, chosen.wide))

    def programs(self, sizes: Mapping[str, int]) -> int:
        blocks = blocks_of(self.kernel, self.schedule)
        return math.prod(-(-sizes[a] // blocks[a]) for a in programs_of(self.kernel))

    def _check(self, sizes: Mapping[str, int]) -> None:
        axis = reduced_axis(self.kernel)
        if axis is not None and not self.schedule.loop and sizes[axis] > self.schedule.block(axis):
            raise OptionError(
                f"{self.kernel.sym_name.data}: one block of {self.schedule.block(axis)} cannot hold the "
                f"{sizes[axis]} elements of {axis!r}; try a schedule with loop=True"
            )

    def _function(self, device: torch.device, assume: Variant) -> driver.Function:
        key = (device, assume)
        if key not in self.functions:
            major, minor = torch.cuda.get_device_capability(device)
            arch = f"sm_{major}{minor}"
            # Without the compiler, a binary that assumes less serves as well.
            if assume.aligned and not toolchain.available():
                careful = Variant(aligned=False, wide=assume.wide)
                if not toolchain.cached(self.source, self.arrays, assume, arch):
                    assume = careful if toolchain.cached(self.source, self.arrays, careful, arch) else assume
            self.functions[key] = driver.Function(self.build(arch, assume), self.kernel.sym_name.data, device)
        return self.functions[key]


class CudaTile:
    name = "cuda_tile"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def compile(self, kernel: KernelOp, schedule: Schedule) -> CudaTileKernel | Pair[CudaTileKernel]:
        if schedule.split == 1:
            return _compile(kernel, schedule)
        halves = split(kernel, schedule.split)
        first, second = of_halves(kernel, schedule, halves.second)
        return Pair(kernel, halves, _compile(halves.first, first), _compile(halves.second, second))

    def propose(self, kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
        return propose(kernel, sizes, Limits(self.machine))

    def no_sums_over_rows(self, row: int | None) -> str:
        if row is None:
            return "how many registers sums over its rows take is not known before it runs"
        fits = row <= longest_summed_row(Limits(self.machine))
        return "" if fits else f"sums over rows of {row} elements do not fit into registers"

    def no_product(self, rows: int, columns: int, depth: int) -> str:
        return ""

    def fitting(self, kernel: KernelOp, sizes: dict[str, int], arch: str) -> list[Schedule]:
        """The proposals whose tiles stay in registers on this architecture: read the report before timing anything."""
        schedules = self.propose(kernel, sizes)
        return [
            s
            for s in schedules
            if not any(compiled.resources(arch).spills for compiled in kernels_of(self.compile(kernel, s)))
        ]


def _compile(kernel: KernelOp, schedule: Schedule) -> CudaTileKernel:
    kernel = without_reduce_exp(kernel)
    return CudaTileKernel(kernel, schedule, write(kernel, schedule), arrays(kernel))


def kernels_of(compiled: CudaTileKernel | Pair[CudaTileKernel]) -> tuple[CudaTileKernel, ...]:
    return (compiled.first, compiled.second) if isinstance(compiled, Pair) else (compiled,)
