"""Which kernel carries out an operator over few rows; and the same where a program calls the operator as such: one from
an artifact, or one that nobody compiled."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from torch import Tensor

from tessera.ops import quantized
from tessera.ops.rows import limits
from tessera.ops.rows.operators import OPERATORS, library
from tessera.torch_internals.operators import op_name

_HOME = {"rows_linear": "linear", "quantized_linear": "linear"}  # others are attention's


@functools.cache
def kernel(name: str) -> Callable:
    """What launches an operator's kernel; Triton is imported only where one is wanted."""
    return getattr(importlib.import_module(f"{__package__}.kernels.{_HOME.get(name, 'attention')}"), name)


def _quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    few = 0 < x.numel() // x.shape[-1] <= limits.ROWS and x.dtype in limits.DTYPES
    run = kernel("quantized_linear") if few else quantized.quantized_linear
    return run(x, weight, scale, bias, kind)


def _called(name: str) -> Callable:
    return lambda *args: kernel(name)(*args)


if limits.has_triton():
    quantized.library.impl("quantized_linear", _quantized_linear, "CUDA")
    for _op in OPERATORS:
        library.impl(op_name(_op), _called(op_name(_op)), "CUDA")
