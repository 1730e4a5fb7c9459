"""Launches attention over a cache and writes to it: `cache_write`, `decode_attention`, `cached_attention` on a GPU.

In: the operators' tensors. Out: their results, in memory of their own, on the current stream; caches are written in
place. Attention writes the new row of its cache itself. A long cache is split, and a second kernel combines the parts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tessera.ops.rows.kernels import split_attention
from tessera.ops.rows.limits import early, units
from tessera.ops.rows.operators import PLAIN


def angles(cosine: Tensor | None, sine: Tensor | None, head: int, other: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Both as rows, and how far apart those of two sequences stand; something else where there are none."""
    if cosine is None or sine is None:
        return other, other, 0, 0
    cosine, sine = cosine.reshape(-1, head), sine.reshape(-1, head)
    return cosine, sine, _apart(cosine), _apart(sine)


def _heads(x: Tensor, batch: int, head: int) -> Tensor:
    """`(batch, heads, head)`, of which every head lies in one piece."""
    x = x.reshape(batch, -1, head)
    return x if x.stride(2) == 1 else x.contiguous()


def _apart(rows: Tensor) -> int:
    """From one sequence to the next; nothing where all have the same."""
    return rows.stride(0) if rows.shape[0] > 1 else 0


def cache_write(
    cache: Tensor, new: Tensor, positions: Tensor, dim: int,
    norm: Tensor | None, eps: float, shift: float, cosine: Tensor | None, sine: Tensor | None,
) -> None:  # fmt: skip
    batch, heads, head = cache.shape[0], cache.shape[3 - dim], cache.shape[3]
    new = _heads(new, batch, head)
    cosine, sine, cosines, sines = angles(cosine, sine, head, new)
    split_attention.write[(batch * heads,)](
        cache, new, positions, new if norm is None else norm, cosine, sine, heads, cache.shape[dim],
        cache.stride(0), cache.stride(3 - dim), cache.stride(dim), *new.stride()[:2], _apart(positions),
        cosines, sines, eps, shift,
        HEAD=head, NORM=norm is not None, TURN=cosine is not new, num_warps=1, **early(),
    )  # fmt: skip


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, mask: Tensor | None, *rest: object
) -> Tensor:
    *prepare, scale = rest
    return _attention(q, k, v, None, positions, positions is not None, mask, prepare, PLAIN, scale)


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor,
    positions: Tensor, limited: bool, mask: Tensor | None, *rest: object,
) -> Tensor:  # fmt: skip
    return _attention(q, k, v, (new_k, new_v), positions, limited, mask, rest[:5], rest[5:10], rest[10])


def _attention(
    q: Tensor, k: Tensor, v: Tensor, new: tuple[Tensor, Tensor] | None,
    positions: Tensor | None, limited: bool, mask: Tensor | None, prepare: tuple, prepare_key: tuple, scale: float,
) -> Tensor:  # fmt: skip
    """Over a cache, into which the `new` key and value go first."""
    batch, groups, length, head = k.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    q = _heads(q, batch, head)
    heads = q.shape[1]
    norm, eps, shift, *turn = prepare
    cosine, sine, cosines, sines = angles(*turn, head, q)
    key_norm, key_eps, key_shift, *key_turn = prepare_key
    key_cosine, key_sine, key_cosines, key_sines = angles(*key_turn, head, q)
    new_k, new_v = (q, q) if new is None else (_heads(x, batch, head) for x in new)
    split, step, registers, parts = attention_plan(batch * groups, length, head, units(k.device))
    span = math.ceil(math.ceil(length / parts) / (split * step)) * split * step
    parts = math.ceil(length / span)
    sums = torch.empty((batch * heads, parts, head) if parts > 1 else (1,), dtype=torch.float32, device=q.device)
    tops = torch.empty((2, batch * heads, parts) if parts > 1 else (1,), dtype=torch.float32, device=q.device)
    shown = None if mask is None else mask.expand(batch, heads, 1, length)
    split_attention.attend[(batch * groups, parts)](
        q, k, v, new_k, new_v, q if positions is None else positions, q if shown is None else shown,
        q if norm is None else norm, cosine, sine, q if key_norm is None else key_norm, key_cosine, key_sine,
        sums, tops, out, heads, groups, length, span, scale,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *new_k.stride()[:2], *new_v.stride()[:2],
        *((0, 0, 0) if shown is None else (shown.stride(0), shown.stride(1), shown.stride(3))),
        0 if positions is None else _apart(positions), cosines, sines, key_cosines, key_sines,
        eps, shift, key_eps, key_shift, parts,
        HEAD=head, SHARE=max(1 << (heads // groups - 1).bit_length(), 8), STEP=step, SPLIT=split, LIMIT=limited,
        MASK=0 if shown is None else 1 if shown.dtype == torch.bool else 2, WRITE=new is not None,
        NORM=norm is not None, TURN=cosine is not q, KEY_NORM=key_norm is not None, KEY_TURN=key_cosine is not q,
        ONE=parts == 1, num_warps=split, num_stages=1, maxnreg=registers, **early(),
    )  # fmt: skip
    if parts > 1:
        shape = {"HEAD": head, "PARTS": 1 << (parts - 1).bit_length()}
        rows = batch * heads
        split_attention.combine[(rows,)](sums, tops, out, rows, parts, **shape, num_warps=2, **early())
    return out


def attention_plan(groups: int, length: int, head: int, units: int) -> tuple[int, int, int, int]:
    """Warps, keys a warp and step, registers, parts of the cache: what was fastest on an H200."""
    split, step = 4, max(min(2048 // head, 32), 16)
    each = (3 if groups > units // 4 else 2) * units // max(groups, 1)  # three programs have room on a multiprocessor
    return split, step, 168, max(min(math.ceil(length / (split * step)), each, 64), 1)
