"""Derivatives of what differentiates a norm: of the backward kernels, and of batch norm's tangent.

A backward kernel is handed statistics that depend on its input, as results that carry no derivative. So a kernel
is differentiated, forward and in reverse, as the arithmetic it stands for, in which the statistics are computed
from the input again: then derivatives of every order see them move. PyTorch's own formulas read the statistics
and hold them still.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Special, Value
from tessera.ir.types import Size
from tessera.ops.families import cast, product
from tessera.ops.formula import finish, pytorch_jvp, pytorch_vjp

Rule = Generator[object, object, tuple]
Eps = torch.Tensor | float


# --- the arithmetic ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Which dimensions of a view of the input a norm's statistics run over, and which its weight does not have."""

    dims: tuple[int, ...]
    across: tuple[int, ...]
    groups: int | None = None  # channels are split in so many; the view then has one dimension more
    centred: bool = True  # rms norm subtracts no mean

    def view(self, t: torch.Tensor) -> torch.Tensor:
        if self.groups is None:
            return t
        return t.reshape(t.shape[0], self.groups, t.shape[1] // self.groups, *t.shape[2:])

    def broadcastable(self, w: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The weight, with size one where the view has dimensions that it does not have."""
        return w.reshape([1 if d in self.across else s for d, s in enumerate(like.shape)])

    def plain(self, x: torch.Tensor, eps: Eps) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised view and one over its spread."""
        middle = x - x.mean(self.dims, keepdim=True) if self.centred else x
        rstd = (middle.square().mean(self.dims, keepdim=True) + eps).rsqrt()
        return middle * rstd, rstd


def rows_layout(ndim: int, over: int, centred: bool = True) -> Layout:
    """Statistics over the last `over` dimensions."""
    lead = ndim - over
    return Layout(tuple(range(lead, ndim)), tuple(range(lead)), None, centred)


def channels_layout(ndim: int) -> Layout:
    rest = tuple(d for d in range(ndim) if d != 1)
    return Layout(rest, rest)


def groups_layout(ndim: int, groups: int) -> Layout:
    return Layout(tuple(range(2, ndim + 1)), (0, *range(3, ndim + 1)), groups)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _moving(
    ct: torch.Tensor, x: torch.Tensor, w: torch.Tensor | None, eps: Eps, layout: Layout, mask: list[bool]
) -> list[torch.Tensor]:
    """Gradients of a norm whose statistics are those of its input."""
    wide = _wide(x.dtype)
    flow = layout.view(ct.to(wide))
    plain, rstd = layout.plain(layout.view(x.to(wide)), eps)
    grads = []
    if mask[0]:
        scaled = flow if w is None else flow * layout.broadcastable(w.to(wide), flow)
        inner = scaled - plain * (scaled * plain).mean(layout.dims, keepdim=True)
        if layout.centred:
            inner = inner - scaled.mean(layout.dims, keepdim=True)
        grads.append((inner * rstd).reshape(x.shape).to(x.dtype))
    return [*grads, *_affine_gradients(flow, plain, x, w, layout, mask)]


def _affine_gradients(
    flow: torch.Tensor, plain: torch.Tensor, x: torch.Tensor, w: torch.Tensor | None, layout: Layout, mask: list[bool]
) -> list[torch.Tensor]:
    dtype = x.dtype if w is None else w.dtype
    terms = [t for t, wanted in zip((flow * plain, flow), mask[1:], strict=False) if wanted]
    if layout.across:
        terms = [t.sum(layout.across) for t in terms]
    return [(t if layout.groups is None else t.flatten(0, 1)).to(dtype) for t in terms]


def _still(
    ct: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
    mask: list[bool],
) -> list[torch.Tensor]:
    """Gradients of batch norm over running statistics."""
    wide, layout = _wide(x.dtype), channels_layout(x.ndim)
    flow = ct.to(wide)
    rstd = layout.broadcastable((var.to(wide) + eps).rsqrt(), flow)
    grads = []
    if mask[0]:
        scaled = flow if w is None else flow * layout.broadcastable(w.to(wide), flow)
        grads.append((scaled * rstd).to(x.dtype))
    plain = (x.to(wide) - layout.broadcastable(mean.to(wide), flow)) * rstd
    return [*grads, *_affine_gradients(flow, plain, x, w, layout, mask)]


def _batch_norm(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None, eps: float) -> torch.Tensor:
    layout = channels_layout(x.ndim)
    y = layout.plain(x.to(_wide(x.dtype)), eps)[0]
    if w is not None:
        y = y * layout.broadcastable(w, y)
    if b is not None:
        y = y + layout.broadcastable(b, y)
    return y.to(x.dtype)


MOVING = Special("norm_backward", _moving)
STILL = Special("batch_norm_backward", _still)
BATCH_NORM = Special("batch_norm", _batch_norm)


# --- a kernel's rules -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A backward kernel: where its arguments hold (ct, x, w), and the arithmetic it stands for with what that is
    told besides those."""

    name: str
    places: tuple[int, int, int]
    arithmetic: Callable[..., tuple[Special, tuple]]

    def forward(self, need: Sequence[object], *args: Arg) -> Rule:
        cts = yield emit(getattr(torch.ops.aten, self.name).default, *args)
        special, rest = self.arithmetic(*args)
        rule = pytorch_vjp([need[i] for i in self.places], special, *(args[i] for i in self.places), *rest)
        next(rule)
        grads = dict(zip(self.places, finish(rule, cts), strict=False))
        return tuple(grads.get(i) for i in range(len(args)))

    def jvp(self, ts: Sequence[Value | None], y: list[Value | None], *args: Arg) -> list[Value | None]:
        special, rest = self.arithmetic(*args)
        moved = [ts[i] for i in self.places]
        out = iter(pytorch_jvp(special, moved, *(args[i] for i in self.places), *rest))
        return [None if v is None else next(out) for v in y]


def _eps(x: Value, mean: Value | None, rstd: Value, dims: list[int]) -> Value:
    """What was added to the variance: the kernel is not told. It is a constant, so nothing flows through it."""
    middle = cast(x, rstd.dtype) if mean is None else cast(x, rstd.dtype) - mean
    return aten.detach(aten.pow(rstd, -2) - aten.mean(middle * middle, dims, True))


def _layer(
    ct: Value, x: Value, shape: list[Size], mean: Value, rstd: Value, w: Value | None, b: Value | None, mask: list[bool]
) -> tuple[Special, tuple]:
    layout = rows_layout(x.ndim, len(shape))
    return MOVING, (_eps(x, mean, rstd, list(layout.dims)), layout, mask)


def _rms(
    ct: Value, x: Value, shape: list[Size], rstd: Value, w: Value | None, mask: list[bool]
) -> tuple[Special, tuple]:
    layout = rows_layout(x.ndim, len(shape), centred=False)
    return MOVING, (_eps(x, None, rstd, list(layout.dims)), layout, mask)


def _batch(
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
) -> tuple[Special, tuple]:
    if training:
        return MOVING, (eps, channels_layout(x.ndim), mask)
    return STILL, (mean, var, eps, mask)


def _batch_cudnn(
    x: Value,
    ct: Value,
    w: Value,
    mean: Value | None,
    var: Value | None,
    save_mean: Value | None,
    save_rstd: Value | None,
    eps: float,
    reserve: Value,
) -> tuple[Special, tuple]:
    return MOVING, (eps, channels_layout(x.ndim), [True, True, True])


def _group(
    ct: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    w: Value | None,
    n: Size,
    c: Size,
    inner: Size,
    groups: int,
    mask: list[bool],
) -> tuple[Special, tuple]:
    rows = aten.reshape(x, [n, groups, product(x.shape[1:]) // groups])
    eps = _eps(rows, aten.unsqueeze(mean, -1), aten.unsqueeze(rstd, -1), [-1])
    eps = aten.reshape(eps, [n, groups, *[1] * (x.ndim - 1)])
    return MOVING, (eps, groups_layout(x.ndim, groups), mask)


LAYER = Kernel("native_layer_norm_backward", (0, 1, 5), _layer)
RMS = Kernel("_fused_rms_norm_backward", (0, 1, 4), _rms)
BATCH = Kernel("native_batch_norm_backward", (0, 1, 2), _batch)
BATCH_UPDATE = Kernel("batch_norm_backward", (0, 1, 2), _batch)
BATCH_CUDNN = Kernel("cudnn_batch_norm_backward", (1, 0, 2), _batch_cudnn)
GROUP = Kernel("native_group_norm_backward", (0, 1, 4), _group)
