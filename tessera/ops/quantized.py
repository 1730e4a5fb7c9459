"""Linear layers whose weight is stored in fewer bits: the formats, the operators and their derivatives.

    quantized_linear  a linear layer whose weight is stored as `kind` says, see `dequantized`
    widened           such a weight in single precision, for gradients

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
from tessera.torch_internals.dispatch import BelowAutograd
from tessera.torch_internals.functorch import is_functorch_wrapped
from tessera.util.errors import RuleError

KINDS = ("int8", "int4", "fp8")
BITS = {"int8": 8, "int4": 4}
GROUP = 128  # weights of small integers that share a scale
TALL = 16  # rows of weights of small integers that are packed together

library = torch.library.Library("tessera", "FRAGMENT")
library.define("quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, str kind) -> Tensor")
library.define("widened(Tensor weight, Tensor scale, str kind) -> Tensor")
LINEAR = torch.ops.tessera.quantized_linear.default
WIDENED = torch.ops.tessera.widened.default

# --- formats ---


def quantized(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A weight `(n, k)` as it is stored, and its scales, both as `dequantized` reads them."""
    full = weight.detach().float()
    if kind == "fp8":
        scale = full.abs().amax(1).clamp(min=1e-12) / 448.0
        return (full / scale[:, None]).to(torch.float8_e4m3fn), scale
    half = 2 ** (BITS[kind] - 1)
    groups = full.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2).clamp(min=1e-12) / (half - 1)).bfloat16()
    whole = (groups / scale.float()[:, :, None]).round().clamp(-half, half - 1)
    return packed(whole.flatten(1).to(torch.int16), BITS[kind]), scale


def dequantized(weight: Tensor, scale: Tensor, kind: str) -> Tensor:
    """`(n, k)` in single precision. fp8 has a scale a row; int8 and int4, packed, one for `GROUP` weights of it."""
    if kind == "fp8":
        return weight.float() * scale.float()[:, None]
    whole = unpacked(weight, BITS[kind])[: len(scale)].float()
    return (whole.unflatten(1, (-1, GROUP)) * scale.float()[:, :, None]).flatten(1)


def packed(whole: Tensor, bits: int) -> Tensor:
    """Small integers `(n, k)` -> bytes `(n / 16, 2 * k * bits)`, a row of bytes for sixteen rows.

    They stand in the order in which the threads of a warp hand them to a matrix unit. A group is `bits / 2` pieces of
    512 bytes: sixteen bytes a thread, eight neighbouring columns of a row and the same of the row eight below it; four
    threads a row. Of four bits, those of the first half of a group are the low ones of a byte.
    """
    whole = F.pad(whole, (0, 0, 0, -len(whole) % TALL))
    parts = whole.reshape(-1, 2, 8, whole.shape[1] // GROUP, 8 // bits, bits // 2, 4, 8)
    parts = parts.permute(0, 3, 5, 2, 6, 1, 7, 4) & (2**bits - 1)  # block, group, piece; row, column; row, column
    numbers = (parts << torch.arange(0, 8, bits, device=whole.device, dtype=whole.dtype)).sum(-1)
    return torch.where(numbers >= 128, numbers - 256, numbers).to(torch.int8).reshape(len(parts), -1)


def unpacked(weight: Tensor, bits: int) -> Tensor:
    """What was `packed`, with as many rows as were filled in to make whole sixteens."""
    parts = weight.to(torch.int16).reshape(len(weight), -1, bits // 2, 8, 4, 2, 8, 1)
    parts = parts >> torch.arange(0, 8, bits, device=weight.device, dtype=torch.int16)
    half = 2 ** (bits - 1)
    whole = ((parts & (2 * half - 1)) ^ half) - half
    return whole.permute(0, 5, 3, 1, 7, 2, 4, 6).reshape(len(weight) * TALL, -1)


def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return F.linear(x, dequantized(weight, scale, kind).to(x.dtype), bias)


def _fake_linear(x: Tensor, weight: Tensor, scale: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], scale.shape[0]))


def _fake_widened(weight: Tensor, scale: Tensor, kind: str) -> Tensor:
    columns = weight.shape[1] if kind == "fp8" else scale.shape[1] * GROUP
    return weight.new_empty((scale.shape[0], columns), dtype=torch.float32)


library.impl("quantized_linear", quantized_linear, "CompositeExplicitAutograd")
library.impl("widened", dequantized, "CompositeExplicitAutograd")
library.impl("quantized_linear", _fake_linear, "Meta")
library.impl("widened", _fake_widened, "Meta")


# --- derivatives ---


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
    "quantized",
    vjp=vjp_quantized,
    jvp=jvp_quantized,
    batch=batch_quantized,
    cost=lambda eqn: 2.0 * eqn.inputs()[0].tensor.numel() * int(eqn.inputs()[2].tensor.shape[0]),
)
declare("tessera.widened", "quantized", zero=True)  # stored weights are no parameters


# --- in eager programs ---


def _eager(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Where a gradient is wanted, plain operators, which autograd and torch.func know; else the operator itself."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or bias is not None and bias.requires_grad)
    if wanted or is_functorch_wrapped(x):  # type: ignore[attr-defined]
        return F.linear(x, WIDENED(weight, scale, kind).to(x.dtype), bias)
    with BelowAutograd():
        return LINEAR(x, weight, scale, bias, kind)


library.impl("quantized_linear", _eager, "Autograd")
