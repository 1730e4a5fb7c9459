"""Two compiled kernels one after the other, with scratch memory between: a reduction or sequential axis shared out.

In: a Split and the compiled halves. Out: something that is called as one kernel is. How much scratch memory a call
needs follows from its symbols alone, so that is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Self, TypeVar

import torch

from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.index import Index
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.rewrites.split_kernel import Split
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.base import Ahead, CompiledKernel

REMEMBERED = 4096  # symbols whose sizes are kept

Half = TypeVar("Half", bound=CompiledKernel)


class Pair(Generic[Half]):
    def __init__(self, kernel: KernelOp, split: Split, first: Half, second: Half) -> None:
        self._begin(first, second, [s.data for s in kernel.symbol_names])
        self.scratch = [(s.size, torch_dtype(s.element)) for s in split.scratch]

    @classmethod
    def restored(cls, first: Half, second: Half, scratch: list[tuple[int, torch.dtype]]) -> Self:
        """A pair without symbols, from its halves and the scratch memory that it needs."""
        instance = cls.__new__(cls)
        instance._begin(first, second, [])
        instance._sizes[()] = scratch
        return instance

    def _begin(self, first: Half, second: Half, symbols: list[str]) -> None:
        self.first, self.second, self.symbols = first, second, symbols
        self.schedule: Schedule | None = None  # that of both together, where the target wants to know it again
        self.scratch: list[tuple[Index, torch.dtype]] = []
        self._sizes: dict[tuple[int, ...], list[tuple[int, torch.dtype]]] = {}

    @property
    def source(self) -> str:
        return self.first.source + "\n\n" + self.second.source

    def ahead(self, device: torch.device) -> None:
        """Both halves, where the target compiles in the background."""
        for half in (self.first, self.second):
            if isinstance(half, Ahead):
                half.ahead(device)

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int] = ()) -> None:
        device = tensors[0].device
        every = [*tensors, *(torch.empty(n, dtype=dtype, device=device) for n, dtype in self.sizes(tuple(symbols)))]
        self.first(every, symbols)
        self.second(every, symbols)

    def sizes(self, symbols: tuple[int, ...]) -> list[tuple[int, torch.dtype]]:
        """Elements of every scratch buffer that a call with these symbols needs."""
        scratch = self._sizes.get(symbols)
        if scratch is None:
            values = dict(zip(self.symbols, symbols, strict=True))
            if len(self._sizes) >= REMEMBERED:
                self._sizes.clear()
            scratch = [(size.evaluate(values.__getitem__, int), dtype) for size, dtype in self.scratch]
            self._sizes[symbols] = scratch
        return scratch

    def saved_scratch(self) -> list[list]:
        """The scratch memory of a pair without symbols, as data."""
        return [[count, str(dtype).removeprefix("torch.")] for count, dtype in self.sizes(())]


def read_scratch(data: list[list]) -> list[tuple[int, torch.dtype]]:
    return [(count, getattr(torch, dtype)) for count, dtype in data]
