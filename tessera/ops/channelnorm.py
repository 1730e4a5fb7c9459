"""Normalisation of channels: batch norm and group norm.

In training, capture writes batch norm as the operator that gives the new running statistics; its derivative
is here. In reverse, evaluation, group norm and instance norm go through PyTorch's formula to the native kernels.
Derivatives of what that gives are `norm_backward`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Value
from tessera.ir.types import Size
from tessera.ops.families import carry, product
from tessera.ops.formula import pytorch_jvp
from tessera.ops.norm import batch_backward, cost_norm
from tessera.ops.norm_backward import BATCH, BATCH_CUDNN, BATCH_NORM, BATCH_UPDATE, GROUP
from tessera.ops.op import declare

Rule = Generator[object, object, tuple]

# --- batch norm -----------------------------------------------------------------------------------------


def forward_batch_norm(
    need: Sequence[object],
    x: Value,
    w: Value | None,
    b: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Rule:
    """Batch statistics and new running ones; as in eager, only the result itself passes gradients back."""
    outs = aten._native_batch_norm_legit_functional(x, w, b, mean, var, training, momentum, eps)
    cts = yield outs
    assert isinstance(cts, list)
    if cts[0] is None:
        return ()
    saved = (mean, var, outs[1], outs[2])
    mask = [bool(n) for n in need[:3]]
    grads = aten.native_batch_norm_backward(cts[0], x, w, *saved, training, eps, mask)
    return tuple(grads)


def batch_channels(name: str) -> Callable:
    """Statistics are per channel, so a batch is just more channels: one call over B·C of them."""
    op = getattr(torch.ops.aten, name).default

    def batch(size: Size, on: Sequence[object], *args: Arg) -> object:
        def fold(a: Arg, carries: object) -> Arg:
            if not isinstance(a, Value):
                return a
            rows = carry(a, bool(carries), size)
            if rows.ndim == 2:
                return aten.reshape(rows, [product(rows.shape)])
            rows = aten.movedim(rows, 0, 1)
            return aten.reshape(rows, [rows.shape[0], product(rows.shape[1:3]), *rows.shape[3:]])

        def unfold(y: Value) -> Value:
            if y.ndim == 1:
                return aten.reshape(y, [size, y.shape[0] // size])
            return aten.movedim(aten.reshape(y, [y.shape[0], size, y.shape[1] // size, *y.shape[2:]]), 1, 0)

        out = emit(op, *map(fold, args, on))
        return [None if y is None else unfold(y) for y in out] if isinstance(out, list) else unfold(out)

    return batch


def jvp_batch_norm(
    ts: Sequence[Value | None],
    y: list[Value] | Value,
    x: Value,
    w: Value | None,
    b: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool = False,
) -> list[Value | None] | Value | None:
    """As in eager, only the result itself moves. In training it is differentiated over statistics that are
    arithmetic on x: those that the native operators give carry no derivative."""
    if training:
        (moved,) = pytorch_jvp(BATCH_NORM, ts[:3], x, w, b, eps)
    else:
        plain = torch.ops.aten.batch_norm.default
        (moved,) = pytorch_jvp(plain, ts[:3], x, w, b, mean, var, False, momentum, eps, cudnn)
    return [moved, *[None] * (len(y) - 1)] if isinstance(y, list) else moved


def jvp_batch_norm_alone(
    ts: Sequence[Value | None], y: list[Value], x: Value, w: Value | None, b: Value | None, *how: Arg
) -> object:
    return jvp_batch_norm(ts, y, x, w, b, None, None, *how)  # type: ignore[arg-type]


def _declare() -> None:
    def family(name: str, **rules: object) -> None:
        declare(f"aten.{name}", "norm", **rules)

    family(
        "_native_batch_norm_legit_functional.default",
        forward=forward_batch_norm,
        jvp=jvp_batch_norm,
        batch=batch_channels("_native_batch_norm_legit_functional"),
        passive=(1, 2, 3, 4),
        cost=cost_norm(8),
    )
    family("native_batch_norm.default", jvp=jvp_batch_norm, cost=cost_norm(8))
    family("_native_batch_norm_legit.no_stats", jvp=jvp_batch_norm_alone, cost=cost_norm(8))
    family("batch_norm.default", jvp=jvp_batch_norm, batch=batch_channels("batch_norm"), cost=cost_norm(4))
    name = "_native_batch_norm_legit_no_training"
    family(f"{name}.default", batch=batch_channels(name), cost=cost_norm(4))
    back = batch_channels("native_batch_norm_backward")
    for kernel, batch in ((BATCH, back), (BATCH_UPDATE, None), (BATCH_CUDNN, None)):
        rules = {"forward": kernel.forward, "jvp": kernel.jvp, "batch": batch}
        family(f"{kernel.name}.default", **rules, cost=cost_norm(12))
    family("group_norm.default", cost=cost_norm(8))
    family("native_group_norm.default", cost=cost_norm(8))
    family(
        "native_group_norm_backward.default",
        forward=GROUP.forward,
        jvp=GROUP.jvp,
        batch=batch_backward("native_group_norm_backward"),
        cost=cost_norm(14),
    )


_declare()
