"""Convolution.

It is linear in its input and in its weight; one native backward gives all gradients asked for. Calls without a batch
dimension and those that name their padding go through PyTorch's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.types import Size, size_hint
from tessera.ops.families import per_dimension, product, total
from tessera.ops.formula import pytorch_batch
from tessera.ops.op import declare
from tessera.torch_internals.operators import OpOverload, op_name

Rule = Generator[Value, Value, tuple]


def _geometry(op: OpOverload, rest: Sequence[Arg], n: int) -> tuple[list, list, list, bool, list, Size]:
    """(stride, padding, dilation, transposed, output_padding, groups), whatever the operator's own order."""
    if op_name(op) == "convolution":
        stride, padding, dilation, transposed, extra, groups = rest
    elif "transpose" in op_name(op):
        (stride, padding, extra, groups, dilation), transposed = rest, True
    else:
        (stride, padding, dilation, groups), transposed, extra = rest, False, 0
    stride, padding, dilation, extra = (per_dimension(x, n) for x in (stride, padding, dilation, extra))
    return stride, padding, dilation, bool(transposed), extra, groups  # type: ignore[return-value]


def _has_batch(eqn: Equation) -> bool:
    """(N, C, spatial…): as many dimensions as the weight has."""
    x, w = eqn.args[:2]
    assert isinstance(x, Value) and isinstance(w, Value)
    return x.ndim == w.ndim


def forward_conv(op: OpOverload) -> Callable:
    def forward(need: Sequence[object], x: Value, w: Value, b: Value | None, *rest: Arg) -> Rule:
        ct = yield emit(op, x, w, b, *rest)
        sizes = None if b is None else list(b.shape)
        mask = [bool(n) for n in need[:3]]
        return tuple(aten.convolution_backward(ct, x, w, sizes, *_geometry(op, rest, w.ndim - 2), mask))

    return forward


def jvp_conv(op: OpOverload) -> Callable:
    def jvp(ts: Sequence[Value | None], y: Value, x: Value, w: Value, b: Value | None, *rest: Arg) -> Value:
        tx, tw, tb = ts[:3]
        moved: list[Value | None] = [None if tx is None else emit(op, tx, w, None, *rest)]
        moved.append(None if tw is None else emit(op, x, tw, None, *rest))
        if tb is not None:
            shift = aten.reshape(tb, [tb.shape[0], *[1] * (w.ndim - 2)])
            moved.append(shift if any(m is not None for m in moved) else aten.expand(shift, list(y.shape)))
        return total(moved)

    return jvp


def batch_conv(op: OpOverload) -> Callable:
    def batch(size: Size, on: Sequence[object], x: Value, w: Value, b: Value | None, *rest: Arg) -> object:
        if on[1] or on[2] or x.ndim - 1 != w.ndim:
            return pytorch_batch(op, on, x, w, b, *rest)
        rows = aten.reshape(x, [product(x.shape[:2]), *x.shape[2:]])
        y = emit(op, rows, w, b, *rest)
        return aten.reshape(y, [size, x.shape[1], *y.shape[1:]])

    return batch


def cost_conv(eqn: Equation) -> float:
    """Two flops a tap for each element of the result, or of the input of a transposed convolution."""
    x, w = eqn.args[:2]
    assert isinstance(x, Value) and isinstance(w, Value)
    name = op_name(eqn.op)  # type: ignore[union-attr]
    transposed = "transpose" in name or (name == "convolution" and bool(eqn.args[6]))
    taps = w.tensor.numel() // max(size_hint(w.shape[0]), 1)
    return 2.0 * taps * (x if transposed else eqn.out).tensor.numel()


def cost_conv_backward(eqn: Equation) -> float:
    ct, x, w = eqn.args[:3]
    assert isinstance(ct, Value) and isinstance(x, Value) and isinstance(w, Value)
    taps = w.tensor.numel() // max(size_hint(w.shape[0]), 1)
    wanted = sum(map(bool, eqn.args[10][:2]))  # type: ignore[index]
    return 2.0 * taps * (x if eqn.args[7] else ct).tensor.numel() * wanted


def _declare() -> None:
    names = ["convolution.default"]
    for n in (1, 2, 3):
        names += [f"conv{n}d.default", f"conv{n}d.padding", f"conv_transpose{n}d.{'default' if n == 1 else 'input'}"]
    for name in names:
        packet, overload = name.split(".")
        op = getattr(getattr(torch.ops.aten, packet), overload)
        rules = {"jvp": jvp_conv(op), "batch": batch_conv(op), "cost": cost_conv}
        if overload != "padding":  # "same" may pad before it convolves: PyTorch's formula knows when
            rules |= {"forward": forward_conv(op), "applies": _has_batch}
        declare(f"aten.{name}", "conv", **rules)
    declare("aten.convolution_backward.default", "conv", cost=cost_conv_backward)


_declare()
