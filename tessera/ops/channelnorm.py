"""Normalisation of channels: batch norm and group norm.

In training, capture writes batch norm as the operator that gives the new running statistics; its derivative
is here. Evaluation, group norm and instance norm go through PyTorch's formula to the native kernels. The
statistics that a backward kernel is handed depend on the input: where PyTorch's derivative of such a kernel
would hold them still, or does not exist, it is taken of the arithmetic the kernel stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import ACTIVE, Arg, Special, Value
from tessera.ir.types import Size
from tessera.ops.families import carry, cast, product
from tessera.ops.formula import finish, pytorch_jvp, pytorch_vjp
from tessera.ops.norm import batch_backward, cost_norm
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

        out = ACTIVE[-1].emit(op, *map(fold, args, on))  # type: ignore[attr-defined]
        return [None if y is None else unfold(y) for y in out] if isinstance(out, list) else unfold(out)

    return batch


def _batch_backward(
    ct: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    training: bool,
    eps: float,
    mask: list[bool],
) -> list[torch.Tensor]:
    """The backward kernel as a function of its input alone: batch statistics move with it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rest = [d for d in range(x.ndim) if d != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    up, flow = x.to(wide), ct.to(wide)
    if training:
        middle = up.mean(rest, keepdim=True)
        rstd = ((up - middle).square().mean(rest, keepdim=True) + eps).rsqrt()
    else:
        assert mean is not None and var is not None
        middle, rstd = mean.to(wide).reshape(shape), (var.to(wide) + eps).rsqrt().reshape(shape)
    plain = (up - middle) * rstd
    grads = []
    if mask[0]:
        scaled = flow if w is None else flow * w.to(wide).reshape(shape)
        if training:
            along = (scaled * plain).mean(rest, keepdim=True)
            scaled = scaled - scaled.mean(rest, keepdim=True) - plain * along
        grads.append((scaled * rstd).to(x.dtype))
    if mask[1]:
        grads.append((flow * plain).sum(rest).to(x.dtype if w is None else w.dtype))
    if mask[2]:
        grads.append(flow.sum(rest).to(x.dtype if w is None else w.dtype))
    return grads


BATCH_BACKWARD = Special("batch_norm_backward", _batch_backward)


def jvp_batch_backward(
    ts: Sequence[Value | None],
    y: list[Value | None],
    ct: Value,
    x: Value,
    w: Value | None,
    mean: Value | None,
    var: Value | None,
    save_mean: Value | None,
    save_rstd: Value | None,
    training: bool,
    eps: float,
    mask: list[bool],
    *reserve: Arg,
) -> list[Value | None]:
    """PyTorch's forward mode would hold the saved statistics still."""
    out = iter(pytorch_jvp(BATCH_BACKWARD, ts[:3], ct, x, w, mean, var, training, eps, mask))
    return [None if v is None else next(out) for v in y]


# --- group norm: its backward kernel has no derivative in PyTorch -----------------------------------------


def _group_backward(
    ct: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor | None,
    eps: torch.Tensor,
    groups: int,
    mask: list[bool],
) -> list[torch.Tensor]:
    n, c = x.shape[0], x.shape[1]
    rows = (n, groups, math.prod(x.shape[1:]) // groups)
    up, flow = x.to(eps.dtype).reshape(rows), ct.to(eps.dtype)
    mean = up.mean(-1, keepdim=True)
    rstd = ((up - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    plain = (up - mean) * rstd
    rest = [d for d in range(x.ndim) if d != 1]
    grads = []
    if mask[0]:
        scaled = (flow if w is None else flow * w.reshape(c, *[1] * (x.ndim - 2))).reshape(rows)
        inner = scaled - scaled.mean(-1, keepdim=True) - plain * (scaled * plain).mean(-1, keepdim=True)
        grads.append((inner * rstd).reshape(x.shape).to(x.dtype))
    if mask[1]:
        grads.append((flow * plain.reshape(x.shape)).sum(rest).to(x.dtype if w is None else w.dtype))
    if mask[2]:
        grads.append(flow.sum(rest).to(x.dtype if w is None else w.dtype))
    return grads


GROUP_BACKWARD = Special("group_norm_backward", _group_backward)


def _group_eps(x: Value, mean: Value, rstd: Value, n: Size, group: int) -> Value:
    """As `_eps`: the backward kernel is handed rstd, not what was added to the variance."""
    rows = aten.reshape(cast(x, rstd.dtype), [n, group, product(x.shape[1:]) // group])
    spread = rows - aten.unsqueeze(mean, -1)
    return aten.unsqueeze(aten.pow(rstd, -2), -1) - aten.mean(spread * spread, [-1], True)


def forward_group_backward(
    need: Sequence[object],
    ct: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    w: Value | None,
    n: Size,
    c: Size,
    inner: Size,
    group: int,
    mask: list[bool],
) -> Rule:
    cts = yield aten.native_group_norm_backward(ct, x, mean, rstd, w, n, c, inner, group, mask)
    eps = _group_eps(x, mean, rstd, n, group)
    rule = pytorch_vjp([need[0], need[1], need[4]], GROUP_BACKWARD, ct, x, w, eps, group, mask)
    next(rule)
    g_ct, g_x, g_w, *_ = finish(rule, cts)
    return g_ct, g_x, None, None, g_w


def jvp_group_backward(
    ts: Sequence[Value | None],
    y: list[Value | None],
    ct: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    w: Value | None,
    n: Size,
    c: Size,
    inner: Size,
    group: int,
    mask: list[bool],
) -> list[Value | None]:
    eps = _group_eps(x, mean, rstd, n, group)
    out = iter(pytorch_jvp(GROUP_BACKWARD, [ts[0], ts[1], ts[4]], ct, x, w, eps, group, mask))
    return [None if v is None else next(out) for v in y]


def _declare() -> None:
    def family(name: str, **rules: object) -> None:
        declare(f"aten.{name}", "norm", **rules)

    family(
        "_native_batch_norm_legit_functional.default",
        forward=forward_batch_norm,
        batch=batch_channels("_native_batch_norm_legit_functional"),
        passive=(1, 2, 3, 4),
        cost=cost_norm(8),
    )
    for name in ("batch_norm", "_native_batch_norm_legit_no_training"):
        family(f"{name}.default", batch=batch_channels(name), cost=cost_norm(4))
    back = batch_channels("native_batch_norm_backward")
    family("native_batch_norm_backward.default", jvp=jvp_batch_backward, batch=back, cost=cost_norm(12))
    family("batch_norm_backward.default", jvp=jvp_batch_backward, cost=cost_norm(12))
    family("group_norm.default", cost=cost_norm(8))
    family("native_group_norm.default", cost=cost_norm(8))
    family(
        "native_group_norm_backward.default",
        forward=forward_group_backward,
        jvp=jvp_group_backward,
        batch=batch_backward("native_group_norm_backward"),
        cost=cost_norm(14),
    )


_declare()
