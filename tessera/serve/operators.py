"""The two operators that stand between a model and its paged cache.

    paged_write      puts new keys or values into their slots of a pool
    paged_attention  lets every query attend to its own sequence, which it finds through a table of blocks

A pool is [blocks, block_size, heads, head]; slot `block * block_size + offset` is a place in it. Tokens of all
sequences lie in one flat row: `starts` says where each sequence begins in it, `positions` where each token stands in
its own. Both are custom operators, so they stay whole in a Trace, and `paged_write` is carried out in place.

What stands here is the reference: PyTorch's attention over gathered pages. On a GPU `paged_kernels.py` does the same
without waiting for the host, and with `single`, where every query counts by itself, `invariant_kernels.py`. A pool in 8
bits holds what was written as float8_e4m3, as near as that comes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.util.phases import phase

WHOLE = 0  # a window of none: a token sees all before it


FP8 = torch.float8_e4m3fn


def _write(pool: Tensor, new: Tensor, slots: Tensor) -> None:
    if pool.dtype is FP8:  # which no operator indexes; what is too large becomes the largest number there is
        most = torch.finfo(FP8).max
        pool, new = pool.view(torch.uint8), new.clamp(-most, most).to(FP8).view(torch.uint8)
    pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, new)


def _gathered(pool: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens of these pages, one after another."""
    raw = pool.view(torch.uint8)[pages].view(FP8) if pool.dtype is FP8 else pool[pages]
    return raw.flatten(0, 1).to(dtype)


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, positions: Tensor, scale: float,
    window: int, softcap: float, single: bool,
) -> Tensor:  # fmt: skip
    if single:  # every query by itself: what it gives depends on its sequence alone, not on how that is cut
        tables = tables.repeat_interleave(starts.diff(), dim=0)
        starts = torch.arange(len(q) + 1)
    out = q.new_zeros(*q.shape[:2], values.shape[3])
    size = keys.shape[1]
    for table, (first, end) in zip(tables, pairwise(starts.tolist()), strict=True):
        if first == end:
            continue
        at = positions[first:end]
        length = int(at[-1]) + 1
        begin = max(0, int(at[0]) - window + 1) if window else 0
        page, within = divmod(begin, size)
        pages = table[page : -(-length // size)]
        k, v = (_gathered(pool, pages, q.dtype)[within : length - page * size] for pool in (keys, values))
        where = torch.arange(begin, length, device=q.device)
        seen = where <= at[:, None]
        if window:
            seen &= where > at[:, None] - window
        out[first:end] = _attend(q[first:end], k, v, seen, scale, softcap)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float) -> Tensor:
    """Queries [t, heads, head] over keys and values [length, kv_heads, head], as far as each one sees."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if not softcap:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return y.squeeze(0).transpose(0, 1)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * scale / softcap)
    weights = scores.float().masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).squeeze(0).transpose(0, 1)


@functools.cache
def _kernel(single: bool) -> Callable:
    """Triton is imported only where a GPU is."""
    with phase("imports"):
        if single:
            return importlib.import_module("tessera.serve.invariant_kernels").attention
        return importlib.import_module("tessera.serve.paged_kernels").paged_attention


def _empty(q: Tensor, keys: Tensor, values: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], values.shape[3])


library = torch.library.Library("tessera", "FRAGMENT")
library.define("paged_write(Tensor(a!) pool, Tensor new, Tensor slots) -> ()")
library.define(
    "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor tables, Tensor starts, Tensor positions, "
    "float scale, int window, float softcap, bool single) -> Tensor"
)
library.impl("paged_write", _write, "CompositeExplicitAutograd")
library.impl("paged_attention", _attention, "CompositeExplicitAutograd")
library.impl("paged_attention", lambda *args: _kernel(args[-1])(*args[:-1]), "CUDA")
torch.library.register_fake("tessera::paged_write", lambda pool, new, slots: None, lib=library)
torch.library.register_fake("tessera::paged_attention", _empty, lib=library)

paged_write = torch.ops.tessera.paged_write
paged_attention = torch.ops.tessera.paged_attention
