"""A tile program of the user's as something to call: on the CPU by LLVM, on a GPU by Triton.

In: a kernel of the tile dialect and names for its buffers. Out: an object that checks what it is given, compiles for
the device of the tensors when it first sees it, and launches. Offsets in a tile program count elements of contiguous
tensors; what it surely reaches is compared with what the tensors hold, since the kernel itself checks nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from xdsl.dialects.builtin import ModuleOp

from tessera.tile.dialect.bounds import reach
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.ops import KernelOp, LoadOp, StoreOp
from tessera.tile.dialect.text import kernels, parse
from tessera.tile.dialect.types import element_of
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets import missing, target_for
from tessera.tile.targets.autotune import choose
from tessera.tile.targets.base import CompiledKernel
from tessera.util.config import config
from tessera.util.errors import InputError, OptionError


def is_tile_program(kernel: object) -> bool:
    return isinstance(kernel, (KernelOp, ModuleOp, str, os.PathLike))


def tile_kernel(name: str, program: object) -> KernelOp:
    """The one kernel of a module, of a text or of a file."""
    if isinstance(program, KernelOp):
        return program
    if isinstance(program, (str, os.PathLike)):
        is_text = isinstance(program, str) and "tile.kernel" in program
        program = parse(str(program)) if is_text else parse(Path(program).read_text(), str(program))
    assert isinstance(program, ModuleOp)
    listed = kernels(program)
    if len(listed) != 1:
        raise OptionError(f"{name}: expected a module with one tile.kernel, got {[k.sym_name.data for k in listed]}")
    return listed[0]


class TileKernel:
    """`parameters` are the buffers, then the symbols."""

    def __init__(self, name: str, kernel: KernelOp, names: Sequence[str] | None, schedule: Schedule | None) -> None:
        self.name, self.kernel, self.schedule = name, kernel, schedule
        self.symbols = tuple(s.data for s in kernel.symbol_names)
        self.dtypes = [torch_dtype(element_of(b)) for b in kernel.buffers]
        self.stored = self._accessed(StoreOp)
        self.buffers = self._names(names)
        self.parameters = (*self.buffers, *self.symbols)
        self.tuned: frozenset[str] = frozenset()
        self.constant: frozenset[str] = frozenset()
        adds = {op.buffer for op in kernel.block.ops if isinstance(op, StoreOp) and op.mode.data == "add"}
        self.summed = {n for n, b in zip(self.buffers, kernel.buffers, strict=True) if b in adds}  # start from zero
        self._compiled: dict[torch.device, CompiledKernel] = {}
        self._fits: set[tuple] = set()

    def _accessed(self, kind: type) -> list[int]:
        touched = {op.buffer for op in self.kernel.block.ops if isinstance(op, kind)}  # type: ignore[attr-defined]
        return [i for i, b in enumerate(self.kernel.buffers) if b in touched]

    def _names(self, names: Sequence[str] | None) -> tuple[str, ...]:
        count = len(self.dtypes)
        if names is not None and len(names) != count:
            raise OptionError(f"{self.name}: expected names= for the {count} buffers of the program, got {list(names)}")
        if names is not None:
            return tuple(names)
        plain = iter(range(count))
        results = iter(range(count))
        return tuple(f"out{next(results)}" if i in self.stored else f"x{next(plain)}" for i in range(count))

    def kind(self, name: str) -> type:
        return torch.Tensor if name in self.buffers else int

    def dtype(self, name: str) -> torch.dtype | None:
        return self.dtypes[self.buffers.index(name)]

    def check_outputs(self, outputs: Sequence[str]) -> None:
        stored = [self.buffers[i] for i in self.stored]
        if set(stored) != set(outputs):
            raise OptionError(f"{self.name}: the program writes {stored}; outputs= names {list(outputs)}")
        if again := [self.buffers[i] for i in self._accessed(LoadOp) if i in self.stored]:
            raise OptionError(f"{self.name}: the program reads {again[0]}, which it writes; a result starts empty")

    def check(self, values: dict[str, object]) -> None:
        for name, dtype in zip(self.buffers, self.dtypes, strict=True):
            t = values.get(name)
            if isinstance(t, torch.Tensor) and t.dtype is not dtype:
                raise InputError(f"{self.name}: {name}: expected {dtype}, as the program has it, got {t.dtype}")

    def launch(self, values: dict[str, object], grid: object, options: dict) -> None:
        tensors: list[torch.Tensor] = [values[n] for n in self.buffers]  # type: ignore[misc]
        symbols = [int(values[n]) for n in self.symbols]  # type: ignore[call-overload]
        self._check_reach(tensors, symbols)
        self._for(tensors, symbols)(tensors, symbols)

    def _check_reach(self, tensors: list[torch.Tensor], symbols: list[int]) -> None:
        key = (*(t.numel() for t in tensors), *symbols)
        if key in self._fits:
            return
        for i, (low, high) in reach(self.kernel, dict(zip(self.symbols, symbols, strict=True))).items():
            if low < 0 or high >= tensors[i].numel():
                raise InputError(
                    f"{self.name}: the program reaches elements {low} to {high} of {self.buffers[i]}, which "
                    f"has {tensors[i].numel()} (shape {list(tensors[i].shape)})"
                )
        self._fits.add(key)

    def _for(self, tensors: list[torch.Tensor], symbols: list[int]) -> CompiledKernel:
        device = tensors[0].device
        compiled = self._compiled.get(device)
        if compiled is None:
            target = target_for(device)
            if target is None:
                why = missing("triton" if device.type == "cuda" else "cpu") if device.type in ("cuda", "cpu") else ""
                raise InputError(f"{self.name}: no target of the tile compiler runs on {device}. {why}".rstrip(". "))
            sizes = dict(zip(self.symbols, symbols, strict=True))
            schedule = self.schedule or choose(target, self.kernel, sizes, tensors if config.autotune else [])
            compiled = self._compiled[device] = target.compile(self.kernel, schedule)
        return compiled
