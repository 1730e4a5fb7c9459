"""Derivatives of a linear layer whose weight is stored in fewer bits: what trains around such a layer needs them.

The stored weight and its scales are no parameters; gradients flow to the input and to the bias. Backward widens the
weight again, so that nothing but its stored form is kept. Eager programs have the same derivative, and keep it widened.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Value
from tessera.ir.types import Size
from tessera.ops.families import sum_to
from tessera.ops.matmul import fold, unfold
from tessera.ops.op import declare
from tessera.ops.rows import library
from tessera.util.errors import RuleError

LINEAR = torch.ops.tessera.quantized_linear.default
WIDENED = torch.ops.tessera.widened.default


def vjp_quantized(ct: Value, y: Value, x: Value, weight: Value, scale: Value, bias: Value | None, kind: str) -> tuple:
    rows = fold(ct)

    def of_input() -> Value:
        full = emit(WIDENED, weight, scale, kind)
        full = full if ct.dtype == torch.float32 else aten._to_copy(full, dtype=ct.dtype)
        return unfold(aten.mm(rows, full), x.shape)

    return of_input, None, None, lambda: None if bias is None else sum_to(rows, bias), None


def jvp_quantized(
    ts: Sequence[Value | None], y: Value, x: Value, weight: Value, scale: Value, bias: Value | None, kind: str
) -> Value:
    tx, tb = ts[0], ts[3]
    if tx is not None:
        return emit(LINEAR, tx, weight, scale, tb, kind)
    assert tb is not None
    return aten.expand(tb, list(y.shape))


def batch_quantized(
    size: Size, on: Sequence[object], x: Value, weight: Value, scale: Value, bias: Value | None, kind: str
) -> Value:
    """Any number of dimensions may stand before the rows."""
    if on[1] or on[2]:
        raise RuleError("vmap: expected one weight for all examples of a quantized layer, got one for each")
    own = bool(on[3]) and bias is not None
    y = emit(LINEAR, x, weight, scale, None if own else bias, kind)
    if not own or bias is None:
        return y
    inner = x.ndim - bool(on[0])
    return y + aten.reshape(bias, [size, *[1] * (inner - 1), bias.shape[-1]])


declare(
    "tessera.quantized_linear",
    "decode",
    vjp=vjp_quantized,
    jvp=jvp_quantized,
    batch=batch_quantized,
    cost=lambda eqn: 2.0 * eqn.inputs()[0].tensor.numel() * int(eqn.inputs()[2].tensor.shape[0]),
)


# --- in eager programs ---


def _eager(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Where a gradient is wanted, plain operators, which autograd and torch.func know; else the operator itself."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or bias is not None and bias.requires_grad)
    if wanted or torch._C._functorch.is_functorch_wrapped_tensor(x):  # type: ignore[attr-defined]
        return F.linear(x, WIDENED(weight, scale, kind).to(x.dtype), bias)
    with torch._C._AutoDispatchBelowAutograd():
        return LINEAR(x, weight, scale, bias, kind)


library.impl("quantized_linear", _eager, "Autograd")
