"""Second operands of small batched products lie row by row.

In: a trace without gradients. Out: the same program, where `q @ k.mT` over many small matrices reads a copy of `k.mT`
that lies in rows; a kernel that computes it writes it so at once. On Arm, PyTorch hands a product whose second operand
alone lies in columns to oneDNN, one matrix at a time, and each call costs more than the product itself.
"""

from __future__ import annotations

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import replace_each
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_hint
from tessera.util.names import names

PRODUCTS = names("matmul bmm")
# Multiplications in the product of two matrices: fewer run as plain loops, more are worth a call. By a Neoverse N1.
SMALL, LARGE = 2**13, 2**20


def product_rows(trace: Trace) -> Trace:
    """Lay out what small batched products read in columns."""
    return replace_each(trace, lambda eqn: eqn.opname in PRODUCTS and _gains(eqn), _in_rows)


def calls_for_columns() -> bool:
    """Whether PyTorch hands such products to oneDNN here."""
    return torch.backends.mkldnn.is_acl_available()


def _gains(eqn: Equation) -> bool:
    a, b = _operands(eqn)
    if not calls_for_columns() or b.device.type != "cpu" or b.dtype != torch.float32:
        return False
    if min(len(a.shape), len(b.shape)) < 3 or any(size_hint(step) == 0 for step in b.stride):  # one matrix, spread
        return False
    rows, depth, columns = (size_hint(n) for n in (*a.shape[-2:], b.shape[-1]))
    in_rows = size_hint(a.stride[-1]) == 1
    in_columns = size_hint(b.stride[-2]) == 1 and size_hint(b.stride[-1]) != 1
    return in_rows and in_columns and rows > 1 and SMALL < rows * depth * columns <= LARGE


def _operands(eqn: Equation) -> tuple[TensorType, TensorType]:
    a, b = eqn.args[:2]
    assert isinstance(a, Value) and isinstance(b, Value)
    return a.tensor, b.tensor


def _in_rows(eqn: Equation) -> Value:
    a, b = eqn.args[:2]
    assert isinstance(a, Value) and isinstance(b, Value)
    product = aten.bmm if eqn.opname == "bmm" else aten.matmul
    return product(a, aten.clone(b, memory_format=torch.contiguous_format))
