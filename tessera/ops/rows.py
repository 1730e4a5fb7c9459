"""Operators for programs over few rows, such as one step of generation, where reading the weights is all the work.

    rows_linear       x times several weights, with the norm before them and the gate or the residual after them
    cache_write       keys or values of one position into a cache
    decode_attention  attention of one query a head over a cache, heads in groups that share keys
    quantized_linear  a linear layer whose weight is stored as `kind` says, see `dequantized`

Here stands what they compute, in PyTorch; CUDA kernels for them stand in `runtime/decode`. `passes/decode` finds the
places for them. What is in between is kept in single precision and rounded once, at the end.

A norm divides by the root of the mean square and multiplies by its weight plus `shift`. Queries, keys and values of
one position come in any shape that holds `(batch, heads, head)` in this order; their heads are normalised, then turned
by rotary angles, given as cosines and sines of `(head,)` or `(batch, head)` in any such shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.ir.equation import Equation
from tessera.ops.op import declare

KINDS = ("int8", "int4", "fp8")
BITS = {"int8": 8, "int4": 4}
GROUP = 128  # weights of small integers that share a scale
GATES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}

library = torch.library.Library("tessera", "FRAGMENT")
library.define(
    "rows_linear(Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases, Tensor? norm, float eps, float shift, "
    "Tensor? residual, str gate, str kind) -> Tensor[]"
)
library.define(
    "cache_write(Tensor(a!) cache, Tensor new, Tensor positions, Tensor? norm, float eps, float shift, "
    "Tensor? cosine, Tensor? sine) -> ()"
)
library.define(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? positions, Tensor? mask, Tensor? norm, float eps, "
    "float shift, Tensor? cosine, Tensor? sine, float scale) -> Tensor"
)
library.define("quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, str kind) -> Tensor")


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def quantized(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A weight `(n, k)` as it is stored, and its scales, both as `dequantized` reads them."""
    full = weight.detach().float()
    if kind == "fp8":
        scale = full.abs().amax(1).clamp(min=1e-12) / 448.0
        return (full / scale[:, None]).to(torch.float8_e4m3fn), scale
    bits, half = BITS[kind], 2 ** (BITS[kind] - 1)
    groups = full.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2).clamp(min=1e-12) / (half - 1)
    whole = (groups / scale[:, :, None]).round().clamp(-half, half - 1).flatten(1).to(torch.int64) + half
    places = torch.arange(32 // bits, device=weight.device)[:, None] * bits
    words = (whole.unflatten(1, (-1, 32 // bits, 4)) << places).sum(2).flatten(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32), scale


def dequantized(weight: Tensor, scale: Tensor, kind: str) -> Tensor:
    """`(n, k)` in single precision. fp8 has a scale a row. int8 and int4 have one for `GROUP` weights of a row, and
    stand in words of 32 bits as numbers from zero: four words hold the first four weights in their lowest bits, the
    next four in the bits after those, and so on."""
    if kind == "fp8":
        return weight.float() * scale.float()[:, None]
    bits = BITS[kind]
    places = torch.arange(32 // bits, device=weight.device, dtype=torch.int32)[:, None] * bits
    whole = (weight.unflatten(1, (-1, 1, 4)) >> places) & (2**bits - 1)
    whole = whole.flatten(1).float() - 2.0 ** (bits - 1)
    return (whole.unflatten(1, (-1, GROUP)) * scale.float()[:, :, None]).flatten(1)


def rows_linear(
    x: Tensor,
    weights: list[Tensor],
    scales: list[Tensor],
    biases: list[Tensor],
    norm: Tensor | None,
    eps: float,
    shift: float,
    residual: Tensor | None,
    gate: str,
    kind: str,
) -> list[Tensor]:
    h = wide(x)
    if norm is not None:
        h = normalised(h, norm, eps, shift)
    full = [dequantized(w, s, kind) for w, s in zip(weights, scales, strict=True)] if kind else weights
    made = [F.linear(h, w.to(h.dtype)) for w in full]
    made = [y + b.to(h.dtype) for y, b in zip(made, biases, strict=True)] if biases else made
    if gate:
        made = [GATES[gate](made[0]) * made[1]]
    if residual is not None:
        made = [made[0] + residual.to(h.dtype)]
    return [y.to(x.dtype) for y in made]


def normalised(h: Tensor, norm: Tensor, eps: float, shift: float) -> Tensor:
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * (norm.to(h.dtype) + shift)


def heads_of(
    x: Tensor,
    like: Tensor,
    norm: Tensor | None,
    eps: float,
    shift: float,
    cosine: Tensor | None,
    sine: Tensor | None,
) -> Tensor:
    """`(batch, heads, 1, head)` for a cache like this, normalised and turned."""
    batch, _, _, head = like.shape
    h = wide(x).reshape(batch, -1, 1, head)
    if norm is not None:
        h = normalised(h, norm, eps, shift)
    if cosine is not None and sine is not None:
        first, second = h.chunk(2, dim=-1)
        cosine, sine = (t.reshape(-1, 1, 1, head).to(h.dtype) for t in (cosine, sine))
        h = h * cosine + torch.cat((-second, first), dim=-1) * sine
    return h.to(x.dtype)


def cache_write(
    cache: Tensor,
    new: Tensor,
    positions: Tensor,
    norm: Tensor | None,
    eps: float,
    shift: float,
    cosine: Tensor | None,
    sine: Tensor | None,
) -> None:
    cache.index_copy_(2, positions, heads_of(new, cache, norm, eps, shift, cosine, sine))


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    norm: Tensor | None,
    eps: float,
    shift: float,
    cosine: Tensor | None,
    sine: Tensor | None,
    scale: float,
) -> Tensor:
    """Of the shape of q."""
    if positions is not None:
        mask = torch.arange(k.shape[2], device=k.device) <= positions[:, None]
    heads = heads_of(q, k, norm, eps, shift, cosine, sine)
    made = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return made.reshape(q.shape)


def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return F.linear(x, dequantized(weight, scale, kind).to(x.dtype), bias)


def _fake_linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


for _name, _fn in (
    ("rows_linear", rows_linear),
    ("cache_write", cache_write),
    ("decode_attention", decode_attention),
    ("quantized_linear", quantized_linear),
):
    library.impl(_name, _fn, "CompositeExplicitAutograd")
library.impl("decode_attention", _fake_attention, "Meta")
library.impl("quantized_linear", _fake_linear, "Meta")


def _linear_cost(eqn: Equation) -> float:
    rows = eqn.inputs()[0].tensor.numel()
    return 2.0 * rows * sum(v.tensor.shape[0] for v in eqn.args[1])  # type: ignore[union-attr,misc]


declare("tessera.rows_linear", "decode", cost=_linear_cost)
declare("tessera.cache_write", "decode")
declare("tessera.decode_attention", "decode", cost=lambda eqn: 4.0 * eqn.inputs()[1].tensor.numel())
declare(
    "tessera.quantized_linear",
    "decode",
    cost=lambda eqn: 2.0 * eqn.inputs()[0].tensor.numel() * int(eqn.inputs()[1].tensor.shape[0]),
)
