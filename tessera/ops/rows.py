"""Operators for programs over few rows, such as one step of generation, where reading the weights is all the work.

    rows_linear       x times several weights, with the norm before them and the gate or the residual after them
    cache_write       keys or values of one position into a cache
    decode_attention  attention of one query a head over a cache, heads in groups that share keys
    cached_attention  two writes and the attention that reads them, as one
    quantized_linear  a linear layer whose weight is stored as `kind` says, see `dequantized`
    widened           such a weight in single precision, for gradients

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
TALL = 16  # rows of weights of small integers that are packed together
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
library.define(
    "cached_attention(Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor new_k, Tensor new_v, Tensor positions, "
    "bool limited, Tensor? mask, Tensor? norm, float eps, float shift, Tensor? cosine, Tensor? sine, Tensor? key_norm, "
    "float key_eps, float key_shift, Tensor? key_cosine, Tensor? key_sine, float scale) -> Tensor"
)
library.define("quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, str kind) -> Tensor")
library.define("widened(Tensor weight, Tensor scale, str kind) -> Tensor")


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
    made = (parts << torch.arange(0, 8, bits, device=whole.device, dtype=whole.dtype)).sum(-1)
    return torch.where(made >= 128, made - 256, made).to(torch.int8).reshape(len(parts), -1)


def unpacked(made: Tensor, bits: int) -> Tensor:
    """What was `packed`, with as many rows as were filled in to make whole sixteens."""
    parts = made.to(torch.int16).reshape(len(made), -1, bits // 2, 8, 4, 2, 8, 1)
    parts = parts >> torch.arange(0, 8, bits, device=made.device, dtype=torch.int16)
    half = 2 ** (bits - 1)
    whole = ((parts & (2 * half - 1)) ^ half) - half
    return whole.permute(0, 5, 3, 1, 7, 2, 4, 6).reshape(len(made) * TALL, -1)


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


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    positions: Tensor,
    limited: bool,
    mask: Tensor | None,
    norm: Tensor | None,
    eps: float,
    shift: float,
    cosine: Tensor | None,
    sine: Tensor | None,
    key_norm: Tensor | None,
    key_eps: float,
    key_shift: float,
    key_cosine: Tensor | None,
    key_sine: Tensor | None,
    scale: float,
) -> Tensor:
    """Both writes, then attention up to `positions` where it is `limited` to that."""
    cache_write(k, new_k, positions, key_norm, key_eps, key_shift, key_cosine, key_sine)
    cache_write(v, new_v, positions, None, 0.0, 0.0, None, None)
    limit = positions if limited else None
    return decode_attention(q, k, v, limit, mask, norm, eps, shift, cosine, sine, scale)


def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return F.linear(x, dequantized(weight, scale, kind).to(x.dtype), bias)


def _fake_linear(x: Tensor, weight: Tensor, scale: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], scale.shape[0]))


def _fake_widened(weight: Tensor, scale: Tensor, kind: str) -> Tensor:
    columns = weight.shape[1] if kind == "fp8" else scale.shape[1] * GROUP
    return weight.new_empty((scale.shape[0], columns), dtype=torch.float32)


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


for _name, _fn in (
    ("rows_linear", rows_linear),
    ("cache_write", cache_write),
    ("decode_attention", decode_attention),
    ("cached_attention", cached_attention),
    ("quantized_linear", quantized_linear),
    ("widened", dequantized),
):
    library.impl(_name, _fn, "CompositeExplicitAutograd")
library.impl("decode_attention", _fake_attention, "Meta")
library.impl("quantized_linear", _fake_linear, "Meta")
library.impl("cached_attention", _fake_attention, "Meta")
library.impl("widened", _fake_widened, "Meta")


def _linear_cost(eqn: Equation) -> float:
    rows = eqn.inputs()[0].tensor.numel()
    return 2.0 * rows * sum(v.tensor.shape[0] for v in eqn.args[2] or eqn.args[1])  # type: ignore[union-attr,misc]


declare("tessera.rows_linear", "decode", cost=_linear_cost)
declare("tessera.cache_write", "decode")
declare("tessera.decode_attention", "decode", cost=lambda eqn: 4.0 * eqn.inputs()[1].tensor.numel())
declare("tessera.cached_attention", "decode", cost=lambda eqn: 4.0 * eqn.inputs()[1].tensor.numel())
declare("tessera.widened", "decode", zero=True)  # stored weights are no parameters
