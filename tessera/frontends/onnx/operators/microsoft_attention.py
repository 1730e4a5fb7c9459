"""com.microsoft: attention of transformers, and rotary positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.attention import heads_first, repeated, rotate
from tessera.frontends.onnx.operators.products import multiplied
from tessera.frontends.onnx.registry import MICROSOFT, operator
from tessera.frontends.onnx.values import number

Tensor = torch.Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Attention, heads first; gives [batch, length, hidden]. Queries are the last of the keys' positions."""
    if causal and (mask is not None or q.shape[2] != k.shape[2]):
        rows = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + (k.shape[2] - q.shape[2])
        allowed = torch.arange(k.shape[2], device=q.device) <= rows
        bias = torch.where(allowed, 0.0, float("-inf")).to(q.dtype)
        mask, causal = bias if mask is None else mask + bias, False
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
    return y.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def key_mask(mask: Tensor | None, q: Tensor, keys: int, low: float) -> Tensor | None:
    """A mask in any of its forms, as what is added to scores: [batch], [batch, keys], [batch, queries, keys], 4-D."""
    if mask is None:
        return None
    if mask.ndim == 1 and mask.shape[0] == q.shape[0]:  # how many keys count
        kept = (torch.arange(keys, device=q.device) < mask.reshape(-1, 1)).reshape(-1, 1, 1, keys)
    elif mask.ndim == 1 and mask.shape[0] == 2 * q.shape[0]:  # where they end, where they begin
        ends, starts = mask.reshape(2, -1, 1)
        place = torch.arange(keys, device=q.device)
        kept = ((place < ends) & (place >= starts)).reshape(-1, 1, 1, keys)
    elif mask.ndim == 2:
        kept = mask.reshape(-1, 1, 1, mask.shape[1]) != 0
    elif mask.ndim == 3:
        kept = mask.unsqueeze(1) != 0
    elif mask.ndim == 4:
        rows = mask.shape[2]
        kept = mask[:, :, rows - q.shape[2] :, :keys] != 0
    else:
        raise OnnxError(f"an attention mask of shape {list(mask.shape)}")
    return torch.where(kept, 0.0, low).to(q.dtype)


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


@operator("Attention", domain=MICROSOFT)
def attention(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_length: Tensor | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: list[int] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
    context: Context,
) -> tuple:
    packed = multiplied(x, w)
    packed = packed if bias is None else packed + bias
    return from_packed(
        packed, mask, past, attention_bias, num_heads, qkv_hidden_sizes, scale, unidirectional, mask_filter_value,
        bool(do_rotary or past_present_share_buffer), context,
    )  # fmt: skip


def from_packed(
    packed: Tensor,
    mask: Tensor | None,
    past: Tensor | None,
    attention_bias: Tensor | None,
    heads: int,
    sizes: list[int] | None,
    scale: float,
    causal: int,
    low: float,
    other: bool,
    context: Context,
) -> tuple:
    """Attention of queries, keys and values side by side."""
    if other:
        raise OnnxError(
            f"{context.node}: do_rotary and past_present_share_buffer are GPU kernels' ways; export without"
        )
    parts = packed.split(sizes or [packed.shape[-1] // 3] * 3, -1)
    q, k, v = (heads_first(p, heads) for p in parts)
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    bias = _added(key_mask(mask, q, k.shape[2], low), attention_bias)
    y = attend(q, k, v, bias, bool(causal), scale or 1.0 / math.sqrt(q.shape[3]))
    return y, (torch.stack([k, v]) if context.wants(1) else None)


@operator("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    padding: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple:
    if query.ndim == 5:  # [batch, length, heads, 3, size]
        query, key, value = (t.flatten(2) for t in query.unbind(3))
    elif key is not None and key.ndim == 5:
        key, value = (t.flatten(2) for t in key.unbind(3))
    if key is None or value is None:
        raise OnnxError("MultiHeadAttention: expected keys and values")
    if bias is not None:
        sizes = [query.shape[-1], query.shape[-1], bias.shape[0] - 2 * query.shape[-1]]
        parts = bias.split(sizes)
        query = query + parts[0]
        key = key + (parts[1] if key.ndim == 3 else parts[1].reshape(1, num_heads, 1, -1))
        value = value + (parts[2] if value.ndim == 3 else parts[2].reshape(1, num_heads, 1, -1))
    q, k, v = (heads_first(t, num_heads) for t in (query, key, value))
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    mask = _added(key_mask(padding, q, k.shape[2], mask_filter_value), attention_bias)
    return attend(q, k, v, mask, bool(unidirectional), scale or 1.0 / math.sqrt(q.shape[3])), k, v


def _turned(x: Tensor, places: Tensor, cos: Tensor, sin: Tensor, interleaved: int) -> Tensor:
    """x: [batch, length, heads, size]."""
    return rotate(x, cos[places].to(x.dtype), sin[places].to(x.dtype), interleaved)


@operator("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(
    x: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    size = 2 * cos.shape[1] if not rotary_embedding_dim else x.shape[-1] // num_heads
    y = x.transpose(1, 2) if x.ndim == 4 else x.reshape(x.shape[0], x.shape[1], -1, size)
    places = positions.to(torch.int64)
    if places.ndim == 1:  # where the sequence begins
        places = places.reshape(1, 1) + torch.arange(y.shape[1], device=x.device)
    y = _turned(y, places, cos, sin, interleaved)
    return y.transpose(1, 2) if x.ndim == 4 else y.reshape(x.shape)


def _stored(past: Tensor | None, new: Tensor, places: Tensor, length: int) -> Tensor:
    """A cache of `length` rows with new ones at each example's places; both heads first."""
    if past is None:
        past = new.new_zeros(new.shape[0], new.shape[1], 0, new.shape[3])
    if past.shape[2] < length:
        rest = new.new_zeros(new.shape[0], new.shape[1], length - past.shape[2], new.shape[3])
        past = torch.cat([past, rest], 2)
    return past.scatter(2, places.reshape(places.shape[0], 1, -1, 1).expand(new.shape), new)


@operator("GroupQueryAttention", domain=MICROSOFT, sizes=(6,))
def group_query_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    last: Tensor,
    total: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_bias: Tensor | None = None,
    head_sink: Tensor | None = None,
    *,
    do_rotary: int = 0,
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    qk_output: int = 0,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    smooth_softmax: int = 0,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
    context: Context,
) -> tuple:
    """`last` is the place of each example's last token; `total` the longest length."""
    if k_quant_type != "NONE" or v_quant_type != "NONE":
        raise OnnxError(f"{context.node}: quantized caches are not known")
    q, k, v = _unpacked(query, key, value, num_heads, kv_num_heads)  # [batch, length, heads, size]
    length = q.shape[1]
    begin = last.to(torch.int64).reshape(-1, 1) + 1 - length
    # A prompt is shorter than the others of its batch only at its end: it begins at 0 then.
    places = begin.clamp(min=0) + torch.arange(length, device=q.device)
    if do_rotary and cos is not None and sin is not None:
        turns = places if position_ids is None else position_ids.to(torch.int64)
        q, k = (_turned(t, turns, cos, sin, rotary_interleaved) for t in (q, k))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    held = 0 if past_key is None else past_key.shape[2]
    rows = max(int(number(total)), held)
    present = _stored(past_key, k, places, rows), _stored(past_value, v, places, rows)
    column = torch.arange(rows, device=q.device)
    row = places.reshape(places.shape[0], 1, -1, 1)
    allowed = column <= row
    if local_window_size > 0:
        allowed = allowed & (column > row - local_window_size)
    keys, values = (repeated(t, num_heads) for t in present)
    scale = scale or 1.0 / math.sqrt(q.shape[3])
    if not softcap and not smooth_softmax and head_sink is None and not qk_output:
        mask = torch.where(allowed, 0.0 if attention_bias is None else attention_bias, float("-inf")).to(q.dtype)
        y, shown = F.scaled_dot_product_attention(q, keys, values, mask, scale=scale), None
    else:
        scores = multiplied(q, keys.transpose(2, 3)) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores if attention_bias is None else scores + attention_bias
        sink = head_sink if head_sink is not None or not smooth_softmax else q.new_zeros(num_heads)
        weights = _with_sink(torch.where(allowed, scores, float("-inf")).float(), sink).to(q.dtype)
        y = multiplied(weights, values)
        shown = weights if qk_output == 2 else torch.where(allowed, scores, 0.0).to(q.dtype)
    return (y.transpose(1, 2).reshape(q.shape[0], length, -1), *present, shown)


def _with_sink(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax over the keys and, where heads have a sink, one more key of that score, whose value is nothing."""
    if sink is None:
        return torch.softmax(scores, -1)
    column = sink.float().reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., : scores.shape[-1]]


def _unpacked(
    query: Tensor, key: Tensor | None, value: Tensor | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    if key is None or value is None:
        size = query.shape[2] // (heads + 2 * kv_heads)
        query, key, value = query.split([heads * size, kv_heads * size, kv_heads * size], 2)
    batch, length = query.shape[:2]
    return (
        query.reshape(batch, length, heads, -1),
        key.reshape(batch, length, kv_heads, -1),
        value.reshape(batch, length, kv_heads, -1),
    )


@operator("DecoderMaskedMultiHeadAttention", domain=MICROSOFT)
def decoder_masked_multi_head_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_length: Tensor | None = None,
    beams: Tensor | None = None,
    indirection: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    output_qk: int = 0,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
    context: Context,
) -> tuple:
    """One token of each sequence; its keys and values go into a cache that is as long as it will ever be."""
    if indirection is not None or output_qk:
        raise OnnxError(f"{context.node}: a cache that beams share, and scores as an output, are not known")
    if not past_present_share_buffer or past_key is None or past_value is None or past_length is None:
        return multi_head_attention(
            query, key, value, bias, mask, attention_bias, past_key, past_value, num_heads=num_heads, scale=scale,
            mask_filter_value=mask_filter_value,
        )  # fmt: skip
    parts = [0, 0, 0] if bias is None else bias.split(query.shape[-1])
    if key is None or value is None:
        raise OnnxError(f"{context.node}: expected keys and values")
    q, k, v = (heads_first(t + p, num_heads) for t, p in zip((query, key, value), parts, strict=True))
    place = past_length.to(torch.int64).reshape(1, 1).expand(q.shape[0], 1)
    rows = past_key.shape[2]
    keys, values = _stored(past_key, k, place, rows), _stored(past_value, v, place, rows)
    unwritten = torch.where(torch.arange(rows, device=q.device) <= place, 0.0, float("-inf"))
    added = unwritten.reshape(-1, 1, 1, rows).to(q.dtype)
    for more in (key_mask(mask, q, rows, mask_filter_value), attention_bias):
        added = added if more is None else added + F.pad(more, (0, rows - more.shape[-1]))
    return attend(q, keys, values, added, False, scale or 1.0 / math.sqrt(q.shape[3])), keys, values
