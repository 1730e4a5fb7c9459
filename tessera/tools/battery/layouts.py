"""Attention, norms, convolutions and losses over every layout, mask, dtype and head size, forward and backward.

Each is compared with eager and, where they differ, with float64: library kernels choose their algorithm, and the
memory order of what they give, by exactly these facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.tools.battery.case import Case, Part
from tessera.tools.battery.operators import COTANGENTS, DTYPES, strided
from tessera.tools.battery.program import Program, check_program

BATCH, HEADS, TIME = 2, 4, 24
HEAD_SIZES = {"cuda": (16, 64, 80, 128, 256), "cpu": (16, 64)}
Laid = Callable[[Tensor], Tensor]


def cases(device: str) -> list[Case]:
    names = [f"attention {order} {mask}" for order in ORDERS for mask in MASKS]
    names += [f"{family} {name}" for family, table in FAMILIES.items() for name in table]
    return [Case("layouts", f"{name} {dtype}", seconds=8.0) for name in names for dtype in DTYPES]


def parts(case: str, device: str) -> Iterator[Part]:
    family, rest = case.split(" ", 1)
    name, _, dtype_name = rest.rpartition(" ")
    dtype = getattr(torch, dtype_name)
    if family == "attention":
        order, mask = name.split(" ", 1)
        yield from attention_parts(order, mask, dtype, device)
        return
    fn, shapes = FAMILIES[family][name]
    for layout, lay in LAYOUTS[family].items():
        for cotangent in COTANGENTS:
            args = arguments(shapes, lay, dtype, device)
            yield f"{layout}, {cotangent} cotangent", trial(fn, args, COTANGENTS[cotangent])


def trial(fn: Callable, args: tuple, cotangent: Laid) -> Callable[[], None]:
    return lambda: check_program(Program(fn, args, backward=True, cotangent=cotangent))


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments(shapes: tuple, lay: Laid, dtype: torch.dtype, device: str) -> tuple:
    """The first tensor as laid out, the others as they are; a tuple is a shape, a function draws its own."""
    leaves = []
    for place, shape in enumerate(shapes):
        t = shape() if callable(shape) else drawn(shape, place).to(dtype)
        t = t.to(device)
        t = lay(t) if place == 0 else t
        leaves.append(t.detach().requires_grad_() if t.is_floating_point() else t)
    return tuple(leaves)


# --- attention ---


def heads_first(heads: int, size: int, time: int, seed: int) -> Tensor:
    return drawn((BATCH, heads, time, size), seed)


def time_first(heads: int, size: int, time: int, seed: int) -> Tensor:
    """As a model makes it: heads are split off the last dimension, then moved forward."""
    return drawn((BATCH, time, heads, size), seed).transpose(1, 2)


def packed(heads: int, size: int, time: int, seed: int) -> Tensor:
    """One of three that lie side by side."""
    return drawn((BATCH, time, 3, heads, size), seed)[:, :, seed % 3].transpose(1, 2)


def last_turned(heads: int, size: int, time: int, seed: int) -> Tensor:
    return drawn((BATCH, heads, size, time), seed).mT


ORDERS = {"heads-first": heads_first, "time-first": time_first, "packed": packed, "turned": last_turned}
OPTIONS: dict[str, dict] = {
    "causal": {"is_causal": True},
    "grouped": {"enable_gqa": True},
    "scaled": {"scale": 0.3},
}
MASKS = ("none", "causal", "boolean", "bias", "grouped", "cross", "scaled")


def attention_parts(order: str, mask: str, dtype: torch.dtype, device: str) -> Iterator[Part]:
    for size in HEAD_SIZES[device]:
        for place, cotangent in enumerate(("contiguous", "time-first", "strided")):
            if cotangent == "strided" and size != 64:
                continue
            lay = {"contiguous": COTANGENTS["contiguous"], "time-first": _turned_heads, "strided": strided}[cotangent]
            fn, args = attention(order, mask, size, dtype, device, place)
            yield f"{size}, {cotangent} cotangent", trial(fn, args, lay)


def _turned_heads(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def attention(order: str, mask: str, size: int, dtype: torch.dtype, device: str, seed: int) -> tuple[Callable, tuple]:
    make = ORDERS[order]
    few = 2 if mask == "grouped" else HEADS
    keys = 40 if mask == "cross" else TIME
    q = make(HEADS, size, TIME, 3 * seed)
    k, v = make(few, size, keys, 3 * seed + 1), make(few, size, keys, 3 * seed + 2)
    given = [_on(t, dtype, device).requires_grad_() for t in (q, k, v)]
    if mask == "boolean":
        allowed = drawn((BATCH, 1, TIME, keys), 9) > -0.5
        allowed[..., 0] = True
        given.append(allowed.to(device))
    elif mask == "bias":
        given.append(_on(drawn((1, HEADS, TIME, keys), 9), dtype, device))
    options = OPTIONS.get(mask, {})

    def fn(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m, **options)

    return fn, tuple(given)


def _on(t: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """There, with the strides it has."""
    empty = torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device) if _dense(t) else None
    return t.to(device, dtype) if empty is None else empty.copy_(t)


def _dense(t: Tensor) -> bool:
    return t.numel() == 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


# --- norms, convolutions, losses: a function, and the shapes of its tensors ---

NORMS: dict[str, tuple[Callable, tuple]] = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (48,), w, b), ((4, 6, 8, 48), (48,), (48,))),
    "layer_norm plain": (lambda x: F.layer_norm(x, (8, 48)), ((4, 6, 8, 48),)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (48,), w, 1e-6), ((4, 6, 8, 48), (48,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 3, w, b), ((4, 6, 8, 48), (6,), (6,))),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), ((4, 6, 8, 48), (6,), (6,))),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((4, 6, 8, 48), (6,), (6,))),
    "batch_norm running": (
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True),
        ((4, 6, 8, 48), (6,), (6,), lambda: torch.zeros(6), lambda: torch.ones(6)),
    ),
    "softmax": (lambda x: F.softmax(x, -1), ((4, 6, 8, 48),)),
    "log_softmax": (lambda x: F.log_softmax(x, 1), ((4, 6, 8, 48),)),
}
CONVOLUTIONS: dict[str, tuple[Callable, tuple]] = {
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), ((2, 16, 12, 10), (8, 16, 3, 3), (8,))),
    "conv2d stride": (lambda x, w, b: F.conv2d(x, w, b, stride=2), ((2, 16, 12, 10), (8, 16, 3, 3), (8,))),
    "conv2d 1x1": (lambda x, w: F.conv2d(x, w), ((2, 16, 12, 10), (8, 16, 1, 1))),
    "conv2d groups": (lambda x, w: F.conv2d(x, w, groups=2, dilation=2), ((2, 16, 12, 10), (8, 8, 3, 3))),
    "conv2d depthwise": (lambda x, w, b: F.conv2d(x, w, b, groups=16), ((2, 16, 12, 10), (16, 1, 3, 3), (16,))),
    "conv2d weight last": (
        lambda x, w: F.conv2d(x, w.contiguous(memory_format=torch.channels_last)),
        ((2, 16, 12, 10), (8, 16, 3, 3)),
    ),
    "conv2d of one image": (lambda x, w: F.conv2d(x[0], w), ((2, 16, 12, 10), (8, 16, 3, 3))),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
        ((2, 16, 12, 10), (16, 8, 3, 3), (8,)),
    ),
    "conv1d": (lambda x, w, b: F.conv1d(x.flatten(2), w, b, padding=1), ((2, 16, 12, 10), (8, 16, 3), (8,))),
    "conv3d": (lambda x, w: F.conv3d(x.unflatten(3, (5, 2)), w), ((2, 16, 12, 10), (8, 16, 3, 3, 2))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), ((2, 16, 12, 10),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), ((2, 16, 12, 10),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), ((2, 16, 12, 10),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((2, 16, 12, 10),)),
    "interpolate nearest": (lambda x: F.interpolate(x, scale_factor=2), ((2, 16, 12, 10),)),
}


def labels() -> Tensor:
    return torch.randint(0, 20, (6, 5), generator=torch.Generator().manual_seed(5))


def some_labels() -> Tensor:
    target = labels()
    target[0, :3] = -100
    return target


def chances() -> Tensor:
    return torch.rand((6, 20, 5), generator=torch.Generator().manual_seed(6)) * 0.8 + 0.1


LOGITS = (6, 20, 5)
LOSSES: dict[str, tuple[Callable, tuple]] = {
    "cross_entropy": (F.cross_entropy, (LOGITS, labels)),
    "cross_entropy each": (lambda x, t: F.cross_entropy(x, t, reduction="none"), (LOGITS, some_labels)),
    "cross_entropy smooth": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (LOGITS, some_labels)),
    "cross_entropy sum": (lambda x, t: F.cross_entropy(x, t, reduction="sum"), (LOGITS, labels)),
    "cross_entropy rows": (
        lambda x, t: F.cross_entropy(x.transpose(1, 2).reshape(-1, 20), t.reshape(-1)),
        (LOGITS, some_labels),
    ),
    "nll_loss": (lambda x, t: F.nll_loss(F.log_softmax(x, 1), t), (LOGITS, labels)),
    "mse_loss": (F.mse_loss, (LOGITS, LOGITS)),
    "l1_loss": (F.l1_loss, (LOGITS, LOGITS)),
    "smooth_l1_loss": (lambda x, t: F.smooth_l1_loss(x, t, reduction="none"), (LOGITS, LOGITS)),
    "huber_loss": (F.huber_loss, (LOGITS, LOGITS)),
    "bce": (lambda x, t: F.binary_cross_entropy(x.sigmoid(), t.to(x.dtype)), (LOGITS, chances)),
    "bce logits": (lambda x, t: F.binary_cross_entropy_with_logits(x, t.to(x.dtype)), (LOGITS, chances)),
    "kl_div": (lambda x, t: F.kl_div(x.log_softmax(1), t.to(x.dtype), reduction="batchmean"), (LOGITS, chances)),
}
FAMILIES = {"norm": NORMS, "convolution": CONVOLUTIONS, "loss": LOSSES}


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def sliced(t: Tensor) -> Tensor:
    """Every second column of a wider tensor, from an odd place on."""
    wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1] + 1), dtype=t.dtype, device=t.device)
    return wide[..., 1::2].copy_(t)


def classes_last(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


_images: dict[str, Laid] = {"contiguous": lambda t: t, "channels last": channels_last, "strided": strided}
LAYOUTS: dict[str, dict[str, Laid]] = {
    "norm": {**_images, "sliced": sliced},
    "convolution": {**_images, "sliced": sliced},
    "loss": {"contiguous": lambda t: t, "classes last": classes_last, "strided": strided},
}
