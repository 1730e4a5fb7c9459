"""Attention in its forms, and rotary positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tessera.frontends.onnx.elements import DTYPES
from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.products import multiplied, sums_in_half
from tessera.frontends.onnx.registry import PREVIEW, operator
from tessera.frontends.onnx.structure import Graph
from tessera.frontends.onnx.values import Untraceable
from tessera.ir.record import recording

Tensor = torch.Tensor


def heads_first(x: Tensor, heads: int | None) -> Tensor:
    """[batch, length, heads * size] as [batch, heads, length, size]."""
    if x.ndim == 4:
        return x
    if not heads:
        raise OnnxError("attention: inputs of three dimensions need the number of heads")
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Key or value heads, each for its group of query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def allowed_keys(
    q: Tensor, k: Tensor, is_causal: int, past: int, lengths: Tensor | None, left: int = -1, right: int = -1
) -> Tensor | None:
    """[…, queries, keys]: which keys each query may look at; None where all."""
    queries, keys = q.shape[2], k.shape[2]
    column = torch.arange(keys, device=q.device)
    row = torch.arange(queries, device=q.device).unsqueeze(1)
    allowed = None
    if lengths is not None:
        length = lengths.to(torch.int64).reshape(-1, 1, 1, 1)
        allowed = column < length
        row = row + (length - queries)
    else:
        row = row + past
    for wanted, condition in (
        (is_causal, lambda: column <= row),
        (left >= 0, lambda: column >= row - left),
        (right >= 0, lambda: column <= row + right),
    ):
        if wanted:
            allowed = condition() if allowed is None else allowed & condition()
    return allowed


@operator("Attention", 23)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    context: Context,
) -> tuple:
    flat = q.ndim == 3
    q, k, v = heads_first(q, q_num_heads), heads_first(k, kv_num_heads), heads_first(v, kv_num_heads)
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    present = (k, v)
    mask = _whole_mask(mask, k.shape[2])
    window = left_window_size >= 0 or right_window_size >= 0
    square = mask is None and lengths is None and past_key is None and not window  # PyTorch's own causal mask
    allowed = allowed_keys(q, k, is_causal, past, lengths, left_window_size, right_window_size)
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    precise = softmax_precision is not None and DTYPES[softmax_precision] != q.dtype
    half = sums_in_half(q)
    if half:
        q, k, v = q.float(), k.float(), v.float()
        mask = mask.float() if mask is not None and mask.dtype == torch.float16 else mask
    if context.wants(3) or softcap or precise:
        y, scores = _attend(q, k, v, mask, allowed, scale, softcap, softmax_precision, qk_matmul_output_mode)
    elif square:
        y, scores = F.scaled_dot_product_attention(q, k, v, is_causal=bool(is_causal), scale=scale), None
    else:
        y, scores = F.scaled_dot_product_attention(q, k, v, _one_mask(mask, allowed), scale=scale), None
    if half:
        y, scores = y.half(), None if scores is None else scores.half()
    if flat:
        y = y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)
    return (y, *present, scores)


def _one_mask(mask: Tensor | None, allowed: Tensor | None) -> Tensor | None:
    if mask is None or allowed is None:
        return allowed if mask is None else mask
    return allowed & mask if mask.dtype == torch.bool else torch.where(allowed, mask, float("-inf"))


def _whole_mask(mask: Tensor | None, keys: int) -> Tensor | None:
    """A mask may end before the keys do; nobody looks at those behind it."""
    if mask is None or mask.shape[-1] == keys:
        return mask
    rest = (0, keys - mask.shape[-1])
    return F.pad(mask, rest, value=False if mask.dtype == torch.bool else float("-inf"))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    allowed: Tensor | None,
    scale: float,
    softcap: float,
    precision: int | None,
    mode: int,
) -> tuple[Tensor, Tensor]:
    root = math.sqrt(scale) if scale >= 0 else None
    scores = (
        multiplied(q * root, (k * root).transpose(2, 3))
        if root is not None
        else multiplied(q, k.transpose(2, 3)) * scale
    )
    seen = [scores]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen.append(scores)
    if mask is not None:
        if mask.dtype == torch.bool:
            allowed = mask if allowed is None else allowed & mask
        else:
            scores = scores + mask.to(scores.dtype)
    if allowed is not None:
        scores = torch.where(allowed, scores, float("-inf"))
    seen.append(scores)
    weights = torch.softmax(scores if precision is None else scores.to(DTYPES[precision]), -1).to(q.dtype)
    weights = torch.where((scores == float("-inf")).all(-1, keepdim=True), 0.0, weights).to(q.dtype)
    seen.append(weights)
    return multiplied(weights, v), seen[mode]


@operator("FlexAttention", domain=PREVIEW)
def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prob_mod: Graph | None = None,
    score_mod: Graph | None = None,
    scale: float | None = None,
    softmax_precision: int | None = None,
    context: Context,
) -> Tensor:
    wide = (
        DTYPES[softmax_precision] if softmax_precision else torch.float64 if q.dtype == torch.float64 else torch.float32
    )
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    scores = multiplied(q, k.transpose(2, 3)).to(wide) * (1.0 / math.sqrt(q.shape[3]) if scale is None else scale)
    if score_mod is not None:
        scores = context.run(score_mod, [scores])[0]
    weights: Tensor = torch.softmax(scores, -1)  # type: ignore[arg-type]
    if prob_mod is not None:
        weights = context.run(prob_mod, [weights])[0]  # type: ignore[assignment]
    return multiplied(weights.to(v.dtype), v).to(q.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: int) -> Tensor:
    """Pairs of elements turned by their position's angles; x: [batch, length, heads, size]."""
    count = 2 * cos.shape[-1]
    turned, rest = x[..., :count], x[..., count:]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turned[..., : count // 2], turned[..., count // 2 :]
        y = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([y, rest], -1) if x.shape[-1] != count else y


@operator("RotaryEmbedding", 23)
def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    y = x.transpose(1, 2) if x.ndim == 4 else x.reshape(x.shape[0], x.shape[1], num_heads, -1)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    half = (rotary_embedding_dim or y.shape[-1]) // 2
    y = rotate(y, cos[..., :half], sin[..., :half], interleaved)
    return y.transpose(1, 2) if x.ndim == 4 else y.reshape(x.shape)


@operator("LinearAttention", 27)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
    context: Context,
) -> tuple[Tensor, Tensor]:
    """A state of keys by values, written and read a token at a time."""
    if recording() is not None and q.shape[1] > context.limits.unrolled:
        raise Untraceable(f"more than {context.limits.unrolled} tokens, one after the other")
    dtype = q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    qs, ks, vs = (heads_first(x, n).to(wide) for x, n in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads)))
    factor = scale or 1.0 / math.sqrt(qs.shape[3])
    state = past.to(wide) if past is not None else qs.new_zeros(q.shape[0], kv_num_heads, ks.shape[3], vs.shape[3])
    gates = None if decay is None else torch.exp(heads_first(decay, kv_num_heads).to(wide))
    rates = None if beta is None else beta.to(wide).transpose(1, 2).unsqueeze(-1)
    rows = []
    for t in range(q.shape[1]):
        key, value = ks[:, :, t], vs[:, :, t]
        if gates is not None and "gated" in update_rule:
            state = state * gates[:, :, t].unsqueeze(-1)
        if "delta" in update_rule:
            value = value - multiplied(key.unsqueeze(2), state).squeeze(2)
            value = value if rates is None else value * rates[:, :, t]
        state = state + key.unsqueeze(-1) * value.unsqueeze(2)
        queries = qs[:, :, t].reshape(q.shape[0], kv_num_heads, -1, qs.shape[3])
        rows.append(multiplied(queries, state).reshape(q.shape[0], -1) * factor)
    return torch.stack(rows, 1).to(dtype), state.to(dtype if past is None else past.dtype)
