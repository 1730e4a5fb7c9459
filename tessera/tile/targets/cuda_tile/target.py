"""The CUDA Tile target: NVIDIA's tile compiler, by way of readable cuTile Python.

`compile` emits and checks the text at once; binaries are made when a kernel is first called, for the GPU it is called
on, or ahead of time with `build`, which needs no GPU. `propose` gives schedules whose tiles fit into registers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tessera.tile import interp
from tessera.tile.dialect import PARALLEL, REDUCE, ContractOp, KernelOp, LoadOp, StoreOp, axes_of
from tessera.tile.flash import flash_of
from tessera.tile.passes.offline import without_reduce_exp
from tessera.tile.schedule import Schedule, inner_axis, reduced_axis
from tessera.tile.targets.cuda_tile import driver, toolchain
from tessera.tile.targets.cuda_tile.arrays import Arrays, Variant, arrays, place, variant
from tessera.tile.targets.cuda_tile.emit import SMALLEST, blocks_of, power_of_two
from tessera.tile.targets.cuda_tile.flash import write
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
        sizes = {a.axis.data: a.size.expr.evaluate(values.__getitem__, int) for a in self.kernel.axes}
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
        return math.prod(-(-sizes[a] // blocks[a]) for a in self.kernel.axis_names(PARALLEL))

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

    def compile(self, kernel: KernelOp, schedule: Schedule) -> CudaTileKernel:
        if kernel.walked is not None:
            raise NotImplementedError(f"{kernel.sym_name.data}: {self.no_walk(None)}")
        kernel = without_reduce_exp(kernel)
        return CudaTileKernel(kernel, schedule, write(kernel, schedule), arrays(kernel))

    def propose(self, kernel: KernelOp, sizes: dict[str, int]) -> list[Schedule]:
        extent = {a.axis.data: a.size.expr.evaluate(sizes.__getitem__, int) for a in kernel.axes}
        if inner_axis(kernel) is not None:
            found = _attention(kernel, extent)
        elif any(isinstance(op, ContractOp) for op in kernel.block.ops):
            found = list(_products(kernel, extent))
        elif reduced_axis(kernel) is not None:
            found = list(_reductions(kernel, extent))
        else:
            found = [_pointwise(kernel, extent, elements) for elements in (1024, 2048, 4096)]
        return list(dict.fromkeys(found))

    def no_walk(self, row: int | None) -> str:
        return "the cuda_tile target sums along its rows or over them, not both in one kernel"

    def fitting(self, kernel: KernelOp, sizes: dict[str, int], arch: str) -> list[Schedule]:
        """The proposals whose tiles stay in registers on this architecture: read the report before timing anything."""
        found = self.propose(kernel, sizes)
        return [s for s in found if not self.compile(kernel, s).resources(arch).spills]


def _contiguous(kernel: KernelOp) -> str | None:
    """The axis along which the accesses of most axes go element by element; the reduced one where two tie."""
    accesses = [op for op in kernel.block.ops if isinstance(op, (LoadOp, StoreOp))]
    known = set(kernel.axis_names())
    rank = max((len(op.at.expr.names() & known) for op in accesses), default=0)
    counts: dict[str, int] = {}
    for op in accesses:
        for a in kernel.axis_names():
            stride = op.at.expr.stride(a)
            if len(op.at.expr.names() & known) == rank and stride is not None and stride.constant == 1:
                counts[a] = counts.get(a, 0) + 1
    return max(counts, key=lambda a: (counts[a], kernel.axis(a).kind.data == REDUCE)) if counts else None


def _pointwise(kernel: KernelOp, extent: Mapping[str, int], elements: int) -> Schedule:
    """Blocks of `elements`: the contiguous axis first, then its neighbours, innermost first."""
    first = _contiguous(kernel)
    order = sorted(kernel.axis_names(), key=lambda a: (a != first, -kernel.axis_names().index(a)))
    return Schedule(blocks=_fill(order, extent, elements))


def _fill(order: Sequence[str], extent: Mapping[str, int], elements: int) -> tuple[tuple[str, int], ...]:
    blocks: list[tuple[str, int]] = []
    for a in order:
        block = min(power_of_two(extent[a]), elements)
        if block > 1:
            blocks.append((a, block))
        elements //= block
    return tuple(blocks)


# What one program holds of a row without a loop; cuTile keeps whole tiles in registers.
WHOLE_ROW = 8192


def _reductions(kernel: KernelOp, extent: Mapping[str, int]) -> list[Schedule]:
    axis = reduced_axis(kernel)
    assert axis is not None
    first = _contiguous(kernel)
    parallel = [a for a in reversed(kernel.axis_names(PARALLEL))]
    if first is not None and first != axis:  # columns: many of them side by side, the axis in a loop
        wide = min(power_of_two(extent[first]), 128)
        return [
            Schedule(blocks=((first, wide), (axis, depth)), loop=True)
            for depth in (32, 64, 16)
            if depth <= power_of_two(extent[axis]) or depth == 16
        ]
    row = power_of_two(extent[axis])
    found: list[Schedule] = []
    if row <= WHOLE_ROW:
        for elements in (1024, 4096, row):
            rows = _fill(parallel, extent, max(elements // row, 1))
            found.append(Schedule(blocks=(*rows, (axis, row))))
    found += [Schedule(blocks=((axis, block),), loop=True) for block in (4096, 2048, 1024) if block <= row]
    return found


# Rows, columns, depth. Larger accumulators than 128 x 128 do not fit: they spill to local memory.
LARGEST = 128 * 128
TILES = ((128, 128, 64), (128, 64, 64), (64, 128, 64), (64, 64, 64), (128, 128, 32), (64, 64, 32), (32, 32, 32))


def _products(kernel: KernelOp, extent: Mapping[str, int]) -> list[Schedule]:
    products = [op for op in kernel.block.ops if isinstance(op, ContractOp)]
    op = products[0]
    lhs, rhs = (set(v.type.axis_names) for v in (op.lhs, op.rhs))  # type: ignore[attr-defined]
    depth = op.axis.data
    rows = [a for a in kernel.axis_names() if a in lhs - rhs]
    columns = [a for a in kernel.axis_names() if a in rhs - lhs]
    found: list[Schedule] = []
    for m, n, k in TILES:
        if len(products) > 1 and m * n * len(products) > LARGEST:  # accumulators side by side
            continue
        blocks = [(depth, min(k, max(power_of_two(extent[depth]), 16)))]
        for group, size in ((rows, m), (columns, n)):
            if group:
                longest = max(group, key=lambda a: extent[a])
                blocks.append((longest, min(size, max(power_of_two(extent[longest]), 16))))
        found.append(Schedule(blocks=tuple(blocks), loop=True, group=8))
    return found


# Rows, keys a step.
MANY_ROWS = ((128, 64), (64, 64), (64, 32), (32, 64))
FEW_ROWS = ((16, 64), (16, 128), (16, 32))


def _attention(kernel: KernelOp, extent: Mapping[str, int]) -> list[Schedule]:
    """Rows that fill the matrix units; a result is whole in one block, so that scores are made once."""
    parts = flash_of(kernel)
    axis = parts.result.axis.data
    rows, columns = ([a for a in axes_of(v) if a != axis] for v in (parts.result.lhs, parts.result.rhs))
    row = next(a for a in reversed(rows) if a not in columns)
    wide = max(power_of_two(extent[columns[-1]]), SMALLEST)
    return [
        Schedule(((row, tall), (columns[-1], wide), (axis, step)), loop=True)
        for tall, step in (MANY_ROWS if extent[row] > 32 else FEW_ROWS)
    ]
