"""Samples of the operators that capture keeps whole: a function and the tensors it takes, as users call them.

Floating-point tensors are what is differentiated. Eager attention has no second derivative where it picks a
fused kernel; `plain` then names the arithmetic to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_draw = torch.Generator().manual_seed(3)


@dataclass(frozen=True)
class Case:
    fn: Callable
    tensors: tuple[torch.Tensor, ...]
    keeps: str = ""  # the operator that capture keeps
    plain: Callable | None = None


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_draw, dtype=torch.float64)


def u(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_draw, dtype=torch.float64) * 0.8 + 0.1


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    scale = scale or q.shape[-1] ** -0.5
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, float("-inf"))
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


CASES: dict[str, Case] = {}


def case(name: str, fn: Callable, *tensors: torch.Tensor, keeps: str = "", **more) -> None:  # noqa: ANN003
    CASES[name] = Case(fn, tensors, keeps, **more)


# --- products ---
for _name, _a, _b in (
    ("vector vector", (4,), (4,)), ("matrix vector", (3, 4), (4,)), ("vector matrix", (4,), (4, 3)),
    ("matrix matrix", (3, 4), (4, 5)), ("batch vector", (2, 3, 4), (4,)), ("batch matrix", (2, 3, 4), (4, 5)),
    ("batch batch", (2, 3, 4), (2, 4, 5)), ("matrix batch", (3, 4), (2, 4, 5)),
    ("vector batch", (4,), (2, 4, 5)), ("heads", (2, 3, 4, 5), (2, 3, 5, 4)),
    ("stretched", (6, 2, 3, 4), (2, 4, 5)), ("one", (2, 3, 4), (1, 4, 5)), ("empty", (0, 3, 4), (4, 5)),
    ("no terms", (3, 0), (0, 2)),
):  # fmt: skip
    case(f"matmul {_name}", torch.matmul, r(*_a), r(*_b), keeps="matmul")
case(
    "matmul of transposed heads",
    lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2).mT,
    r(2, 4, 3, 5),
    r(2, 4, 3, 5),
)
case("linear", F.linear, r(4, 5), r(6, 5), r(6), keeps="linear")
case("linear of a batch", F.linear, r(2, 4, 5), r(6, 5), r(6), keeps="linear")
case("linear without bias", F.linear, r(2, 4, 5), r(6, 5), keeps="linear")
case("linear of a vector", F.linear, r(5), r(6, 5), r(6), keeps="linear")
case("linear by a vector", F.linear, r(4, 5), r(5), keeps="linear")
case("linear of a transpose", lambda x, w, b: F.linear(x.transpose(0, 1), w, b), r(4, 2, 5), r(6, 5), r(6))
case("mm", torch.mm, r(3, 4), r(4, 5), keeps="mm")
case("bmm", torch.bmm, r(2, 3, 4), r(2, 4, 5), keeps="bmm")
case("mv", torch.mv, r(3, 4), r(4), keeps="mv")
case("dot", torch.dot, r(4), r(4), keeps="dot")
case("outer", torch.outer, r(3), r(4), keeps="outer")
case("addmm", torch.addmm, r(5), r(3, 4), r(4, 5), keeps="addmm")
case(
    "addmm scaled",
    lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3),
    r(3, 5),
    r(3, 4),
    r(4, 5),
    keeps="addmm",
)
case(
    "baddbmm",
    lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5),
    r(3, 5),
    r(2, 3, 4),
    r(2, 4, 5),
    keeps="baddbmm",
)
case("addmv", lambda c, a, b: torch.addmv(c, a, b, alpha=2), r(3), r(3, 4), r(4), keeps="addmv")
case("einsum", lambda a, b: torch.einsum("bld,hd->bhl", a, b), r(2, 3, 4), r(6, 4), keeps="einsum")
case("einsum with dots", lambda a, b: torch.einsum("...ij,jk", a, b), r(2, 3, 4), r(4, 5), keeps="einsum")

# --- normalisation ---
case("layer_norm", lambda x, w, b: F.layer_norm(x, (5,), w, b), r(2, 4, 5), r(5), r(5), keeps="layer_norm")
case("layer_norm plain", lambda x: F.layer_norm(x, (4, 5)), r(2, 4, 5), keeps="layer_norm")
case("layer_norm weight", lambda x, w: F.layer_norm(x, (5,), w), r(2, 4, 5), r(5), keeps="layer_norm")
case("rms_norm", lambda x, w: F.rms_norm(x, (5,), w, 1e-6), r(2, 4, 5), r(5), keeps="rms_norm")
case("rms_norm plain", lambda x: F.rms_norm(x, (4, 5)), r(2, 4, 5), keeps="rms_norm")
case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), r(2, 4, 5), r(4), r(4), keeps="group_norm")
case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), r(2, 4, 5), r(4), r(4))
case(
    "batch_norm evaluation",
    lambda x, w, b, m, v: F.batch_norm(x, m.detach(), v.detach(), w, b, False),
    r(3, 4, 5), r(4), r(4), r(4), u(4), keeps="batch_norm",
)  # fmt: skip
case("batch_norm training", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), r(3, 4, 5), r(4), r(4))

# --- softmax, embedding ---
case("softmax", lambda x: F.softmax(x, -1), r(3, 4), keeps="softmax")
case("softmax dim 0", lambda x: F.softmax(x, 0), r(3, 4), keeps="softmax")
case("log_softmax", lambda x: F.log_softmax(x, 1), r(3, 4, 2), keeps="log_softmax")
_indices = torch.tensor([[1, 0, 2], [2, 3, 1]])
case("embedding", lambda w, i: F.embedding(i, w), r(4, 3), _indices, keeps="embedding")
case(
    "embedding padded",
    lambda w, i: F.embedding(i, w, padding_idx=2),
    r(4, 3),
    _indices,
    keeps="embedding",
)
case(
    "embedding_bag",
    lambda w, i: F.embedding_bag(i, w, mode="mean"),
    r(4, 3),
    _indices,
    keeps="embedding_bag",
)

# --- attention ---
_qkv = r(2, 4, 6, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)
_bias = r(6, 6)
_allowed = torch.rand(2, 1, 6, 6, generator=_draw) > 0.3
_allowed[..., 0] = True
for _name, _options in (
    ("attention", {}), ("attention causal", {"is_causal": True}), ("attention scaled", {"scale": 0.3}),
):  # fmt: skip
    case(
        _name,
        lambda q, k, v, o=_options: F.scaled_dot_product_attention(q, k, v, **o),
        *_qkv,
        keeps="scaled_dot_product_attention",
        plain=lambda q, k, v, o=_options: attention(q, k, v, **o),
    )
case(
    "attention grouped",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    r(2, 4, 6, 8), r(2, 2, 6, 8), r(2, 2, 6, 8), keeps="scaled_dot_product_attention",
    plain=lambda q, k, v: attention(q, k, v, enable_gqa=True),
)  # fmt: skip
case(
    "attention masked",
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
    *_qkv, _allowed, keeps="scaled_dot_product_attention", plain=attention,
)  # fmt: skip
case("attention biased", F.scaled_dot_product_attention, *_qkv, _bias, plain=attention)
case("attention of one sequence", F.scaled_dot_product_attention, r(6, 8), r(5, 8), r(5, 3), plain=attention)

# --- losses ---
_labels = torch.tensor([0, 2, 1])
case("cross_entropy", F.cross_entropy, r(3, 4), _labels, keeps="cross_entropy_loss")
case("cross_entropy of images", F.cross_entropy, r(2, 4, 3), torch.tensor([[0, 2, 1], [3, 3, 0]]))
case("cross_entropy smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), r(3, 4), _labels)
case(
    "cross_entropy ignoring",
    lambda x, t: F.cross_entropy(x, t, ignore_index=2, reduction="sum"),
    r(3, 4),
    _labels,
)
case("cross_entropy weighted", lambda x, t, w: F.cross_entropy(x, t, w.detach()), r(3, 4), _labels, u(4))
case("cross_entropy of probabilities", F.cross_entropy, r(3, 4), u(3, 4))
case("nll_loss", F.nll_loss, r(3, 4), _labels, keeps="nll_loss_nd")
for _loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
    case(_loss.__name__, _loss, r(3, 4), r(3, 4), keeps=_loss.__name__)
case("binary_cross_entropy", F.binary_cross_entropy, u(3, 4), u(3, 4), keeps="binary_cross_entropy")
case("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, r(3, 4), u(3, 4))
case("kl_div", lambda x, t: F.kl_div(x, t, reduction="mean"), r(3, 4), u(3, 4), keeps="kl_div")

# --- convolution and pooling ---
case("conv1d", F.conv1d, r(2, 3, 8), r(4, 3, 3), r(4), keeps="conv1d")
case(
    "conv2d",
    lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
    r(2, 3, 6, 6),
    r(4, 3, 3, 3),
    r(4),
    keeps="conv2d",
)
case(
    "conv2d groups",
    lambda x, w: F.conv2d(x, w, groups=2, dilation=2),
    r(2, 4, 6, 6),
    r(4, 2, 3, 3),
    keeps="conv2d",
)
case("conv2d of one image", F.conv2d, r(3, 6, 6), r(4, 3, 3, 3), r(4), keeps="conv2d")
case("conv1d same", lambda x, w: F.conv1d(x, w, padding="same"), r(2, 3, 8), r(4, 3, 4), keeps="conv1d")
case("conv3d", F.conv3d, r(1, 2, 4, 4, 4), r(3, 2, 2, 2, 2), r(3), keeps="conv3d")
case(
    "conv_transpose2d",
    lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
    r(2, 3, 4, 4),
    r(3, 4, 3, 3),
    r(4),
)
case("max_pool2d", lambda x: F.max_pool2d(x, 2), r(2, 3, 6, 6), keeps="max_pool2d")
case("avg_pool2d", lambda x: F.avg_pool2d(x, 2), r(2, 3, 6, 6), keeps="avg_pool2d")
case(
    "adaptive_avg_pool2d",
    lambda x: F.adaptive_avg_pool2d(x, 2),
    r(2, 3, 6, 6),
    keeps="adaptive_avg_pool2d",
)
for _mode, _op in (
    ("nearest", "upsample_nearest2d"),
    ("bilinear", "upsample_bilinear2d"),
    ("bicubic", "upsample_bicubic2d"),
):
    case(
        f"interpolate {_mode}",
        lambda x, m=_mode: F.interpolate(x, scale_factor=2, mode=m),
        r(2, 2, 3, 3),
        keeps=_op,
    )
case("interpolate to a size", lambda x: F.interpolate(x, size=5, mode="linear", align_corners=True), r(2, 2, 3))
case("interpolate exactly", lambda x: F.interpolate(x, size=(5, 4), mode="nearest-exact"), r(2, 2, 3, 3))
