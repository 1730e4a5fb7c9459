"""Products whose rows do not depend on how many there are: what a deterministic step multiplies by.

Libraries choose a kernel, and with it the order of a sum, by the number of rows. So within `invariant()` every product
with a matrix (linear layers, also those stored in fewer bits, `addmm`, `mm`, `matmul`) becomes one operator,
`tessera::invariant_linear`, which stays whole in a Trace. On a GPU it is a kernel of our own (`invariant_kernels.py`).
What stands here is the rest: a library's product over always as many rows, again and again.

What else a step computes keeps rows apart by itself, or is attention, which `paged_attention` computes with `single`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS = 16  # of each product


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    whole = F.pad(rows, (0, 0, 0, -len(rows) % ROWS)).contiguous()
    parts = [F.linear(part, weight, bias) for part in whole.split(ROWS)]
    return torch.cat(parts)[: len(rows)].view(*x.shape[:-1], len(weight))


@functools.cache
def _kernel() -> Callable:
    """Triton is imported only where a GPU is."""
    return importlib.import_module("tessera.serve.invariant_kernels").linear


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


library = torch.library.Library("tessera", "FRAGMENT")
library.define("invariant_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
library.impl("invariant_linear", _linear, "CompositeExplicitAutograd")
library.impl("invariant_linear", lambda *args: _kernel()(*args), "CUDA")
torch.library.register_fake("tessera::invariant_linear", _empty, lib=library)
invariant_linear = torch.ops.tessera.invariant_linear


def _of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return invariant_linear(input, weight, bias)


def _of_quantized(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return invariant_linear(x, torch.ops.tessera.widened(weight, scale, kind).to(x.dtype), bias)


def _of_matmul(input: Tensor, other: Tensor) -> Tensor | None:
    return invariant_linear(input, other.t(), None) if input.dim() > 1 and other.dim() == 2 else None


def _of_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if input.dim() == beta == alpha == 1:
        return invariant_linear(mat1, mat2.t(), input)
    return input * beta + invariant_linear(mat1, mat2.t(), None) * alpha


# None: the product is computed as it comes.
_REPLACED: dict[object, Callable[..., Tensor | None]] = {
    F.linear: _of_linear,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _of_matmul),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _of_addmm),
}


def prepare() -> None:
    """Before a model is run within `invariant`: an engine from an artifact does without, and without the compiler."""
    importlib.import_module("tessera.ops.quantized")
    _REPLACED[torch.ops.tessera.quantized_linear] = _of_quantized


class _Invariant(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204  as PyTorch has it
        made = _REPLACED[func](*args, **(kwargs or {})) if func in _REPLACED else None
        return func(*args, **(kwargs or {})) if made is None else made


def invariant(wanted: bool = True) -> contextlib.AbstractContextManager[object]:
    return _Invariant() if wanted else contextlib.nullcontext()
