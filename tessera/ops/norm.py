"""Normalisation over the last dimensions: layer norm and rms norm.

Each stays one operator in a captured program. Under differentiation it becomes the native operator that also
gives the statistics backward wants, and one native backward with the mask of what is asked for; where PyTorch
has no such kernel (rms norm outside of CUDA), backward is the arithmetic itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.types import Size
from tessera.ops.families import carry, cast, fit, pad_rank, product, sum_to, total
from tessera.ops.formula import finish, pytorch_batch
from tessera.ops.norm_backward import LAYER, RMS
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


def batch_backward(name: str) -> Callable:
    """PyTorch's batching rule wants the batch on every tensor."""
    op = getattr(torch.ops.aten, name).default

    def batch(size: Size, on: Sequence[object], *args: Arg) -> object:
        tensors = [isinstance(a, Value) for a in args]
        lifted = [carry(a, bool(b), size) if isinstance(a, Value) else a for a, b in zip(args, on, strict=True)]
        return pytorch_batch(op, tensors, *lifted)

    return batch


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


def jvp_layer_norm(ts: Sequence[Value | None], y: Value, *args: Arg) -> Value | None:
    """Over statistics that are arithmetic on x: those of the native operator carry no derivative, so a second one
    of this rule would hold them still."""
    tx, _, tw, tb = ts[:4]
    x, shape, w, _, eps = args[:5]
    assert isinstance(x, Value)
    dims = list(range(-len(shape), 0))  # type: ignore[arg-type]
    up = cast(x, _wide(x.dtype))
    centred = up - aten.mean(up, dims, True)
    rstd = aten.rsqrt(aten.mean(centred * centred, dims, True) + eps)
    plain = centred * rstd
    moved: list[Value | None] = [tb]
    if tx is not None:
        flow = (tx - aten.mean(tx, dims, True) - plain * aten.mean(tx * plain, dims, True)) * rstd
        moved.append(flow if w is None else flow * w)
    if tw is not None:
        moved.append(plain * tw)
    return fit(total(moved), y)


def jvp_native_layer_norm(ts: Sequence[Value | None], y: list[Value], *args: Arg) -> list[Value | None]:
    return [jvp_layer_norm(ts, y[0], *args), None, None]


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


def _composed_rms_norm(x: Value, shape: list[Size], w: Value | None, eps: float | None) -> tuple[Value, Value]:
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


def forward_rms_norm(need: Sequence[object], x: Value, shape: list[Size], w: Value | None, eps: float | None) -> Rule:
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


def _declare() -> None:
    def family(name: str, **rules: object) -> None:
        declare(f"aten.{name}", "norm", **rules)

    family(
        "layer_norm.default", forward=forward_layer_norm, jvp=jvp_layer_norm, batch=batch_layer_norm, cost=cost_norm(8)
    )
    family(
        "native_layer_norm.default",
        forward=forward_native_layer_norm,
        jvp=jvp_native_layer_norm,
        passive=(1, 2),
        cost=cost_norm(8),
    )
    family(
        "native_layer_norm_backward.default",
        forward=LAYER.forward,
        jvp=LAYER.jvp,
        batch=batch_backward("native_layer_norm_backward"),
        cost=cost_norm(14),
    )
    family("rms_norm.default", forward=forward_rms_norm, jvp=jvp_rms_norm, batch=batch_rms_norm, cost=cost_norm(5))
    family("_fused_rms_norm.default", forward=forward_fused_rms_norm, cost=cost_norm(5))
    family("_fused_rms_norm_backward.default", forward=RMS.forward, jvp=RMS.jvp, cost=cost_norm(12))


_declare()
