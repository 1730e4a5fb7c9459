"""Normalisation: layer, rms, batch and group norm.

Each stays one operator in a captured program. Under differentiation it becomes the native operator that also
gives the statistics backward wants, and one native backward with the mask of what is asked for; what has no
rule here (group and instance norm, batch norm in evaluation) goes through PyTorch's formula to the same kernels.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Special, Value
from tessera.ir.types import Size
from tessera.ops.families import cast, fit, pad_rank, product, sum_to, total
from tessera.ops.formula import finish, holding, pytorch_jvp, pytorch_vjp
from tessera.ops.op import declare

Rule = Generator[object, object, tuple]


def cost_norm(per_element: float):  # noqa: ANN201
    def cost(eqn: Equation) -> float:
        return per_element * eqn.results()[0].tensor.numel()

    return cost


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Single precision at least: what statistics are computed in."""
    return torch.promote_types(dtype, torch.float32)


def _affine(y: Value, w: Value | None, b: Value | None, on: Sequence[object]) -> Value:
    """`y * w + b`, where a batched w or b stands over the trailing dimensions of a batched y."""
    if w is not None:
        y = y * (pad_rank(w, y.ndim) if on[0] else w)
    if b is not None:
        y = y + (pad_rank(b, y.ndim) if on[1] else b)
    return y


# --- layer norm ---------------------------------------------------------------------------------------


def forward_native_layer_norm(
    need: Sequence[object], x: Value, shape: list[Size], w: Value | None, b: Value | None, eps: float
) -> Rule:
    y, mean, rstd = aten.native_layer_norm(x, shape, w, b, eps)
    cts = yield [y, mean, rstd]
    mask = [bool(need[0]), bool(need[2]), bool(need[3])]
    ct = cts[0] if isinstance(cts, list) else cts
    if ct is None:
        return ()
    gx, gw, gb = aten.native_layer_norm_backward(ct, x, shape, mean, rstd, w, b, mask)
    return gx, None, gw, gb


def forward_layer_norm(
    need: Sequence[object], x: Value, shape: list[Size], w: Value | None, b: Value | None, eps: float, cudnn: bool
) -> Rule:
    rule = forward_native_layer_norm(need, x, shape, w, b, eps)
    ct = yield next(rule)[0]  # type: ignore[index]
    return finish(rule, [ct, None, None])


def jvp_layer_norm(
    ts: Sequence[Value | None],
    y: Value,
    x: Value,
    shape: list[Size],
    w: Value | None,
    b: Value | None,
    eps: float,
    cudnn: bool,
) -> Value:
    tx, _, tw, tb = ts[:4]
    dims = list(range(-len(shape), 0))
    plain, mean, rstd = aten.native_layer_norm(x, shape, None, None, eps)
    moved: list[Value | None] = [tb]
    if tx is not None:
        flow = tx - aten.mean(tx, dims, True)
        flow = (flow - plain * aten.mean(tx * plain, dims, True)) * rstd
        moved.append(flow if w is None else flow * w)
    if tw is not None:
        moved.append(plain * tw)
    return fit(total(moved), y)


def batch_layer_norm(
    size: Size,
    on: Sequence[object],
    x: Value,
    shape: list[Size],
    w: Value | None,
    b: Value | None,
    eps: float,
    cudnn: bool,
) -> Value:
    if not (on[2] or on[3]):
        return aten.layer_norm(x, shape, w, b, eps, cudnn)
    y = aten.layer_norm(cast(x, _wide(x.dtype)), shape, None, None, eps, cudnn)
    return cast(_affine(y if on[0] else aten.unsqueeze(y, 0), w, b, on[2:4]), x.dtype)


# --- rms norm -----------------------------------------------------------------------------------------


def _fuses(x: Value, shape: list[Size], w: Value | None) -> bool:
    """PyTorch has one operator that gives rstd as well; it wants plain sizes and one dtype."""
    return all(type(s) is int for s in shape) and (w is None or w.dtype == x.dtype)


def _composed_rms_norm(
    x: Value, shape: list[Size], w: Value | None, eps: float | None
) -> tuple[Value, Value]:
    """What eager computes where it has no kernel: in single precision at least, rounded once."""
    wide = _wide(x.dtype)
    if eps is None:
        eps = torch.finfo(wide).eps
    up = cast(x, wide)
    rstd = aten.rsqrt(aten.mean(aten.pow(up, 2), list(range(-len(shape), 0)), True) + eps)
    y = up * rstd
    return cast(y if w is None else y * w, x.dtype), rstd


def rms_gradients(
    need: tuple[bool, bool], ct: Value, x: Value, shape: list[Size], rstd: Value, w: Value | None
) -> tuple[Value | None, Value | None]:
    """Of y = x·rstd·w, all in the precision of rstd."""
    dims = list(range(-len(shape), 0))
    ct, up = cast(ct, rstd.dtype), cast(x, rstd.dtype)
    plain = up * rstd
    gx = gw = None
    if need[0]:
        flow = ct if w is None else ct * w
        gx = cast((flow - plain * aten.mean(flow * plain, dims, True)) * rstd, x.dtype)
    if need[1] and w is not None:
        gw = cast(sum_to(ct * plain, w), w.dtype)
    return gx, gw


def forward_fused_rms_norm(
    need: Sequence[object], x: Value, shape: list[Size], w: Value | None, eps: float | None
) -> Rule:
    if _fuses(x, shape, w):
        y, rstd = aten._fused_rms_norm(x, shape, w, eps)
    else:
        y, rstd = _composed_rms_norm(x, shape, w, eps)
    ct, ct_rstd = yield [y, rstd]  # type: ignore[misc]
    wanted = bool(need[0]), bool(need[2])
    gx = gw = None
    if ct is not None and x.tensor.device.type == "cuda" and _fuses(x, shape, w):
        gx, gw = aten._fused_rms_norm_backward(ct, x, shape, rstd, w, list(wanted))
    elif ct is not None:
        gx, gw = rms_gradients(wanted, ct, x, shape, rstd, w)
    if ct_rstd is not None and need[0]:  # second order: rstd = (mean(x²) + eps)^-1/2
        count = product(shape)
        more = cast(aten.pow(rstd, 3) * ct_rstd * cast(x, rstd.dtype) / count, x.dtype)
        gx = -more if gx is None else gx - more
    return gx, None, gw


def forward_rms_norm(
    need: Sequence[object], x: Value, shape: list[Size], w: Value | None, eps: float | None
) -> Rule:
    rule = forward_fused_rms_norm(need, x, shape, w, eps)
    ct = yield next(rule)[0]  # type: ignore[index]
    return finish(rule, [ct, None])


def jvp_rms_norm(
    ts: Sequence[Value | None], y: Value, x: Value, shape: list[Size], w: Value | None, eps: float | None
) -> Value:
    tx, _, tw = ts[:3]
    _, rstd = _composed_rms_norm(x, shape, None, eps)
    plain = cast(x, rstd.dtype) * rstd
    moved: list[Value | None] = []
    if tx is not None:
        flow = (tx - plain * aten.mean(tx * plain, list(range(-len(shape), 0)), True)) * rstd
        moved.append(flow if w is None else flow * w)
    if tw is not None:
        moved.append(plain * tw)
    return fit(total(moved), y)


def batch_rms_norm(
    size: Size, on: Sequence[object], x: Value, shape: list[Size], w: Value | None, eps: float | None
) -> Value:
    if not on[2]:
        return aten.rms_norm(x, shape, w, eps)
    y = aten.rms_norm(cast(x, _wide(x.dtype)), shape, None, eps)
    return cast(_affine(y if on[0] else aten.unsqueeze(y, 0), w, None, (on[2], False)), x.dtype)


def _rms_backward(
    ct: torch.Tensor, x: torch.Tensor, w: torch.Tensor | None, eps: torch.Tensor, dims: list[int], mask: list[bool]
) -> list[torch.Tensor]:
    """The fused backward as a function of its input alone, for derivatives of it."""
    up, flow = x.to(eps.dtype), ct.to(eps.dtype)
    rstd = (up.square().mean(dims, keepdim=True) + eps).rsqrt()
    plain = up * rstd
    scaled = flow if w is None else flow * w
    grads = []
    if mask[0]:
        grads.append(((scaled - plain * (scaled * plain).mean(dims, keepdim=True)) * rstd).to(x.dtype))
    if mask[1] and w is not None:
        grads.append((flow * plain).sum(list(range(x.ndim - w.ndim))).to(w.dtype))
    return grads


RMS_BACKWARD = Special("rms_norm_backward", _rms_backward)


def _eps(x: Value, rstd: Value, dims: list[int]) -> Value:
    """What was added to the mean square: the fused backward is not told. Constant, so it has no derivative."""
    up = cast(x, rstd.dtype)
    return aten.pow(rstd, -2) - aten.mean(up * up, dims, True)


def forward_rms_backward(
    need: Sequence[object], ct: Value, x: Value, shape: list[Size], rstd: Value, w: Value | None, mask: list[bool]
) -> Rule:
    cts = yield aten._fused_rms_norm_backward(ct, x, shape, rstd, w, mask)
    dims = list(range(-len(shape), 0))
    rule = pytorch_vjp([need[0], need[1], need[4]], RMS_BACKWARD, ct, x, w, _eps(x, rstd, dims), dims, mask)
    next(rule)
    g_ct, g_x, g_w, *_ = finish(rule, cts)
    return g_ct, g_x, None, None, g_w


def jvp_rms_backward(
    ts: Sequence[Value | None],
    y: list[Value | None],
    ct: Value,
    x: Value,
    shape: list[Size],
    rstd: Value,
    w: Value | None,
    mask: list[bool],
) -> list[Value | None]:
    dims = list(range(-len(shape), 0))
    moved = [ts[0], ts[1], ts[4]]
    out = iter(pytorch_jvp(RMS_BACKWARD, moved, ct, x, w, _eps(x, rstd, dims), dims, mask))
    return [None if v is None else next(out) for v in y]


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
    """Batch statistics and new running ones; only the normalised result passes gradients back, as in eager."""
    outs = aten._native_batch_norm_legit_functional(x, w, b, mean, var, training, momentum, eps)
    cts = yield outs
    if cts[0] is None:  # type: ignore[index]
        return ()
    mask = [bool(n) for n in need[:3]]
    grads = aten.native_batch_norm_backward(
        cts[0], x, w, mean, var, outs[1], outs[2], training, eps, mask  # type: ignore[index]
    )
    return tuple(grads)


# --- group norm: its backward kernel has no derivative in PyTorch -----------------------------------------


def _group_backward(
    ct: torch.Tensor, x: torch.Tensor, w: torch.Tensor | None, eps: torch.Tensor, groups: int, mask: list[bool]
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
        "layer_norm.default",
        forward=forward_layer_norm,
        jvp=jvp_layer_norm,
        batch=batch_layer_norm,
        cost=cost_norm(8),
    )
    family("native_layer_norm.default", forward=forward_native_layer_norm, passive=(1, 2), cost=cost_norm(8))
    family(
        "native_layer_norm_backward.default",
        forward=holding(torch.ops.aten.native_layer_norm_backward.default, "mean", "rstd"),
        cost=cost_norm(14),
    )
    family("rms_norm.default", forward=forward_rms_norm, jvp=jvp_rms_norm, batch=batch_rms_norm, cost=cost_norm(5))
    family("_fused_rms_norm.default", forward=forward_fused_rms_norm, cost=cost_norm(5))
    family(
        "_fused_rms_norm_backward.default", forward=forward_rms_backward, jvp=jvp_rms_backward, cost=cost_norm(12)
    )
    family("batch_norm.default", cost=cost_norm(4))
    family(
        "_native_batch_norm_legit_functional.default",
        forward=forward_batch_norm,
        passive=(1, 2, 3, 4),
        cost=cost_norm(8),
    )
    for name in ("native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward"):
        op = getattr(torch.ops.aten, name).default
        statistics = ("running_mean", "running_var", "save_mean", "save_invstd", "save_var", "reserve", "reserveSpace")
        family(f"{name}.default", forward=holding(op, *statistics), cost=cost_norm(12))
    family("group_norm.default", cost=cost_norm(8))
    family("native_group_norm.default", cost=cost_norm(8))
    family(
        "native_group_norm_backward.default",
        forward=forward_group_backward,
        jvp=jvp_group_backward,
        cost=cost_norm(14),
    )


_declare()
