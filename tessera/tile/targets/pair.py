"""Two compiled kernels one after the other, with scratch memory between them: a reduction or a walk that is shared out.

In: a Split and the compiled halves. Out: something that is called as one kernel is. How much scratch memory a call
needs follows from its symbols alone, so that is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from tessera.tile.dialect import KernelOp
from tessera.tile.elements import torch_dtype
from tessera.tile.parting import Split
from tessera.tile.targets.base import CompiledKernel

REMEMBERED = 4096  # symbols whose sizes are kept

Half = TypeVar("Half", bound=CompiledKernel)


class Pair(Generic[Half]):
    def __init__(self, kernel: KernelOp, split: Split, first: Half, second: Half) -> None:
        self.first, self.second = first, second
        self.symbols = [s.data for s in kernel.symbol_names]
        self.scratch = [(s.size, torch_dtype(s.element)) for s in split.scratch]
        self._sizes: dict[tuple[int, ...], list[tuple[int, torch.dtype]]] = {}

    @property
    def source(self) -> str:
        return self.first.source + "\n\n" + self.second.source

    def ahead(self, device: torch.device) -> None:
        """Both halves, where the target compiles in the background."""
        for half in (self.first, self.second):
            if (begin := getattr(half, "ahead", None)) is not None:
                begin(device)

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int] = ()) -> None:
        device = tensors[0].device
        every = [*tensors, *(torch.empty(n, dtype=dtype, device=device) for n, dtype in self.sizes(tuple(symbols)))]
        self.first(every, symbols)
        self.second(every, symbols)

    def sizes(self, symbols: tuple[int, ...]) -> list[tuple[int, torch.dtype]]:
        """Elements of every scratch buffer that a call with these symbols needs."""
        found = self._sizes.get(symbols)
        if found is None:
            values = dict(zip(self.symbols, symbols, strict=True))
            if len(self._sizes) >= REMEMBERED:
                self._sizes.clear()
            found = [(size.evaluate(values.__getitem__, int), dtype) for size, dtype in self.scratch]
            self._sizes[symbols] = found
        return found
