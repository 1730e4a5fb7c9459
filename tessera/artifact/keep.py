"""Kernels of compiled programs, as an artifact keeps them.

In: what the tile executor made of regions. Out: data that `regions.py` makes callables of on a machine without the
compiler, and the machine code beside it. Every kernel is compiled again from its tile program for the level of
processors that the artifact is for, which need not be this machine's.
"""

from __future__ import annotations

from typing import Protocol

from tessera.executors.base import Executor
from tessera.executors.serial import NONE, Claimed
from tessera.ir.kernel import Kernel
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.index import Index, Name
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.from_trace.around import write_around
from tessera.tile.from_trace.kernel import TileKernel
from tessera.tile.from_trace.segments import OneByOne
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.cpu.host import host_of
from tessera.tile.targets.cpu.image import PAGE, Image
from tessera.tile.targets.cpu.link import image_of
from tessera.tile.targets.cpu.process import openmp
from tessera.tile.targets.cpu.target import in_halves, object_of


class KeptRegions(Claimed):
    """Writes claimed operators; regions with their kernels for one target."""

    def __init__(self, executors: tuple[str, ...], target: TargetKernels | None) -> None:
        super().__init__(executors)
        self.target = target

    def _kernel(self, kernel: Kernel | None, executor: Executor) -> int:
        if not isinstance(kernel, TileKernel) or self.target is None:
            return NONE
        origin = id(kernel.origin)
        if origin not in self._saved:
            data = self.target.keep(kernel)
            self._saved[origin] = NONE if data is None else len(self.kernels)
            self.kernels += [] if data is None else [data]
        return self._saved[origin]


class TargetKernels(Protocol):
    """Kernels for one target, and their machine code."""

    kind: str  # of device

    def keep(self, kernel: TileKernel) -> dict | None: ...

    def code(self) -> bytes: ...

    def listed(self) -> dict[str, object]: ...


class CpuKernels:
    """Machine code for one level of processors."""

    kind = "cpu"

    def __init__(self, level: str) -> None:
        self.level, self.host, self.images = level, host_of(level), list[Image]()
        self._known: dict[str, int] = {}

    def keep(self, kernel: TileKernel) -> dict | None:
        if kernel.segments:
            if not isinstance(kernel.compiled, OneByOne):
                return None
            segments = [[list(s.inputs), list(s.outputs), s.length] for s in kernel.segments]
            return {"segments": segments, "kernel": self._compiled(kernel.tile, kernel.schedule)}
        data = self._compiled(kernel.tile, kernel.schedule)
        return {**write_around(kernel.body, kernel.lowered), "kernel": data}

    def _compiled(self, kernel: KernelOp, schedule: Schedule) -> dict:
        if schedule.split == 1:
            return {"image": self._image(kernel, schedule)}
        halves, *both = in_halves(kernel, schedule, self.host)
        scratch = [[size_data(s.size), str(torch_dtype(s.element)).removeprefix("torch.")] for s in halves.scratch]
        symbols = [s.data for s in kernel.symbol_names]
        return {"halves": [self._image(*half) for half in both], "scratch": scratch, "symbols": symbols}

    def _image(self, kernel: KernelOp, schedule: Schedule) -> int:
        source, _, code = object_of(kernel, schedule, self.host)
        if source not in self._known:
            self._known[source] = len(self.images)
            self.images.append(image_of(code, kernel.sym_name.data))
        return self._known[source]

    def code(self) -> bytes:
        """All images, each at a page."""
        return b"".join(image.code + bytes(-len(image.code) % PAGE) for image in self.images)

    def listed(self) -> dict[str, object]:
        """What a reader has to know of them."""
        rows, at = [], 0
        for image in self.images:
            rows.append([image.name, at, len(image.code), image.entry, [list(pair) for pair in image.imports]])
            at += -(-len(image.code) // PAGE) * PAGE
        return {"level": self.level, "openmp": openmp(), "images": rows}


def size_data(index: Index) -> object:
    """An index expression over symbols as a size's data."""
    if index.constant is not None:
        return index.constant
    return ["size", _tree(index)]


def _tree(index: Index) -> object:
    terms = []
    for product, factor in index.terms:
        atoms = [
            a.name if isinstance(a, Name) else ["FloorDiv" if a.kind == "//" else "Mod", _tree(a.left), _tree(a.right)]
            for a in product
        ]
        terms.append(["Mul", factor, *atoms] if atoms else factor)
    return ["Add", *terms] if terms else 0
