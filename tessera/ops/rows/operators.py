"""Operators over few rows, and what they compute, in PyTorch: the meaning that every kernel is tested against.

    rows_linear       x times several weights, with the norm before them and the gate or the residual after them
    cache_write       keys or values of one token of every sequence into a cache, whose length stands at `dim`
    decode_attention  attention of one query a head over a cache, heads in groups that share keys
    cached_attention  two writes and the attention that reads them, as one

What is in between is kept in single precision and rounded once, at the end.

A norm divides by the root of the mean square and multiplies by its weight plus `shift`. Queries, keys and values of a
token come in any shape that holds `(batch, heads, head)` in this order. `prepare` stands for norm, eps, shift, cosine
and sine: heads are normalised, then turned by rotary angles, of `(head,)` or `(batch, head)` in any such shape.
`positions` holds one number for all sequences or one for each; attention that is limited sees up to it. Attention takes
keys and values as `(batch, heads, length, head)` by their strides: a cache that lies otherwise comes transposed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.ir.equation import Equation
from tessera.ops.op import declare
from tessera.ops.quantized import dequantized

GATES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
PLAIN = (None, 0.0, 0.0, None, None)  # of `prepare`: neither normalised nor turned

_PREPARE = "Tensor? norm, float eps, float shift, Tensor? cosine, Tensor? sine"
_KEYS = "Tensor? key_norm, float key_eps, float key_shift, Tensor? key_cosine, Tensor? key_sine"
library = torch.library.Library("tessera", "FRAGMENT")
library.define(
    "rows_linear(Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases, Tensor? norm, float eps, float shift, "
    "Tensor? residual, str gate, str kind) -> Tensor[]"
)
library.define(f"cache_write(Tensor(a!) cache, Tensor new, Tensor positions, int dim, {_PREPARE}) -> ()")
library.define(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? positions, Tensor? mask, "
    f"{_PREPARE}, float scale) -> Tensor"
)
library.define(
    "cached_attention(Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor new_k, Tensor new_v, Tensor positions, "
    f"bool limited, Tensor? mask, {_PREPARE}, {_KEYS}, float scale) -> Tensor"
)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rows_linear(
    x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor],
    norm: Tensor | None, eps: float, shift: float, residual: Tensor | None, gate: str, kind: str,
) -> list[Tensor]:  # fmt: skip
    h = wide(x)
    if norm is not None:
        h = normalised(h, norm, eps, shift)
    full = [dequantized(w, s, kind) for w, s in zip(weights, scales, strict=True)] if kind else weights
    results = [F.linear(h, w.to(h.dtype)) for w in full]
    results = [y + b.to(h.dtype) for y, b in zip(results, biases, strict=True)] if biases else results
    if gate:
        results = [GATES[gate](results[0]) * results[1]]
    if residual is not None:
        results = [results[0] + residual.to(h.dtype)]
    return [y.to(x.dtype) for y in results]


def normalised(h: Tensor, norm: Tensor, eps: float, shift: float) -> Tensor:
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * (norm.to(h.dtype) + shift)


def prepared(
    x: Tensor, batch: int, head: int,
    norm: Tensor | None, eps: float, shift: float, cosine: Tensor | None, sine: Tensor | None,
) -> Tensor:  # fmt: skip
    """`(batch, heads, head)`, normalised and turned."""
    h = wide(x).reshape(batch, -1, head)
    if norm is not None:
        h = normalised(h, norm, eps, shift)
    if cosine is not None and sine is not None:
        first, second = h.chunk(2, dim=-1)
        cosine, sine = (t.reshape(-1, 1, head).to(h.dtype) for t in (cosine, sine))
        h = h * cosine + torch.cat((-second, first), dim=-1) * sine
    return h.to(x.dtype)


def cache_write(cache: Tensor, new: Tensor, positions: Tensor, dim: int, *prepare: object) -> None:
    batch, head = cache.shape[0], cache.shape[3]
    by_position = cache.transpose(1, 2) if dim == 2 else cache
    heads = prepared(new, batch, head, *prepare)  # type: ignore[arg-type]
    by_position[torch.arange(batch, device=cache.device), positions.reshape(-1)] = heads


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, mask: Tensor | None, *rest: object
) -> Tensor:
    """Of the shape of q. `rest` is `prepare` and the scale."""
    *prepare, scale = rest
    if positions is not None:
        mask = torch.arange(k.shape[2], device=k.device) <= positions.reshape(-1, 1, 1, 1)
    heads = prepared(q, k.shape[0], k.shape[3], *prepare)[:, :, None]  # type: ignore[arg-type]
    attended = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, scale=scale, enable_gqa=True)  # type: ignore[arg-type]
    return attended.reshape(q.shape)


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor,
    positions: Tensor, limited: bool, mask: Tensor | None, *rest: object,
) -> Tensor:  # fmt: skip
    """Both writes, then attention up to `positions` where it is `limited` to that. `rest` is `prepare` of the query,
    `prepare` of the keys, and the scale."""
    cache_write(k, new_k, positions, 2, *rest[5:10])
    cache_write(v, new_v, positions, 2, *PLAIN)
    return decode_attention(q, k, v, positions if limited else None, mask, *rest[:5], rest[10])


def _fake_attention(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


OPERATORS = {
    getattr(torch.ops.tessera, fn.__name__).default: fn
    for fn in (rows_linear, cache_write, decode_attention, cached_attention)
}
for _op, _fn in OPERATORS.items():
    library.impl(_op, _fn, "CompositeExplicitAutograd")
library.impl("decode_attention", _fake_attention, "Meta")
library.impl("cached_attention", _fake_attention, "Meta")


def _linear_cost(eqn: Equation) -> float:
    rows = eqn.inputs()[0].tensor.numel()
    return 2.0 * rows * sum(v.tensor.shape[0] for v in eqn.args[2] or eqn.args[1])  # type: ignore[union-attr,misc]


def _attention_cost(eqn: Equation) -> float:
    return 4.0 * eqn.inputs()[1].tensor.numel()


declare("tessera.rows_linear", "rows", cost=_linear_cost)
declare("tessera.cache_write", "rows")
declare("tessera.decode_attention", "rows", cost=_attention_cost)
declare("tessera.cached_attention", "rows", cost=_attention_cost)
