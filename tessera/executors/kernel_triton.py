"""A Triton kernel of the user's as something to call.

In: what `@triton.jit` gives, perhaps under `@triton.autotune` or `@triton.heuristics`. Out: an object that knows the
kernel's parameters (which are compile-time constants, which the tuner chooses) and launches it on its tensors' device.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence

import torch

from tessera.util.errors import InputError, OptionError

_NUMBERS = {"int": int, "float": float, "bool": bool}


class TritonKernel:
    def __init__(self, name: str, kernel: object, scalars: dict[str, type]) -> None:
        self.name, self.kernel = name, kernel
        self.function, self.tuned = _unwrap(name, kernel)
        self.signature = inspect.signature(self.function).parameters
        self.parameters = tuple(self.signature)
        self.constant = frozenset(n for n, p in self.signature.items() if "constexpr" in str(p.annotation))
        self.summed: set[str] = set()
        self.scalars = scalars
        if unknown := set(scalars) - set(self.parameters):
            raise OptionError(f"{name}: scalars= names {sorted(unknown)}; the kernel has {list(self.parameters)}")

    def kind(self, name: str) -> type:
        p = self.signature[name]
        if name in self.scalars:
            return self.scalars[name]
        if isinstance(p.default, (bool, int, float)):
            return type(p.default)
        written = p.annotation if isinstance(p.annotation, str) else getattr(p.annotation, "__name__", "")
        return _NUMBERS.get(written, torch.Tensor)

    def dtype(self, name: str) -> torch.dtype | None:
        return None

    def check_outputs(self, outputs: Sequence[str]) -> None:
        if not outputs:
            raise OptionError(f"{self.name}: expected outputs= to name the parameters that the kernel writes")

    def check(self, values: dict[str, object]) -> None:
        """A Triton kernel takes what it is given; it is compiled anew for every dtype."""

    def launch(self, values: dict[str, object], grid: object, options: dict) -> None:
        tensors = [t for t in values.values() if isinstance(t, torch.Tensor)]
        device = tensors[0].device
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise InputError(
                f"{self.name}: a Triton kernel runs on a GPU, its tensors are on the cpu; for debugging, "
                "TRITON_INTERPRET=1 set before Triton is imported runs it there"
            )
        arguments = {n: values[n] for n in self.parameters if n in values}
        if device.type == "cuda":
            with torch.cuda.device(device):
                self.kernel[grid](**arguments, **options)  # type: ignore[index]
        else:
            self.kernel[grid](**arguments, **options)  # type: ignore[index]


def _unwrap(name: str, kernel: object) -> tuple[Callable, frozenset[str]]:
    """The Python function under Triton's wrappers, and the parameters that they choose."""
    tuned: set[str] = set()
    while not inspect.isfunction(kernel):
        for config in getattr(kernel, "configs", None) or ():
            tuned |= set(config.kwargs)
        if isinstance(values := getattr(kernel, "values", None), dict):  # heuristics
            tuned |= set(values)
        kernel = getattr(kernel, "fn", None)
        if kernel is None:
            raise OptionError(
                f"{name}: expected a kernel made by @triton.jit, or a tile program (a tile.kernel, MLIR text or a file)"
            )
    return kernel, frozenset(tuned)
