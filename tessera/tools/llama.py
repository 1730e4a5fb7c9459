"""A Llama-like decoder for benchmarks and examples: RMS norms, rotary positions, grouped heads, a gated MLP.

Without a cache it takes token ids `(batch, time)` and gives logits, or the mean cross-entropy against targets. With
a `Cache` it reads and writes keys and values at given positions, so that prefill and one-token decode are the same
program at different sizes. The cache is plain tensors, written in place. It follows the protocol of `tessera.Engine`
(`serve/programs.py: Paged`), as a model of one's own would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.serve.programs import Layer, Site


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. The defaults are the model that the model benchmarks measure."""

    layers: int = 8
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 8192
    vocab: int = 32000
    theta: float = 10000.0
    eps: float = 1e-5

    @property
    def head(self) -> int:
        return self.width // self.heads


@dataclass
class Cache:
    """Keys and values of every layer, `(batch, kv_heads, length, head)` each."""

    keys: list[Tensor]
    values: list[Tensor]

    @staticmethod
    def empty(config: LlamaConfig, batch: int, length: int, like: Tensor) -> Cache:
        shape = (batch, config.kv_heads, length, config.head)
        buffers = [[like.new_zeros(shape) for _ in range(config.layers)] for _ in range(2)]
        return Cache(*buffers)


class Attention(nn.Module):
    """Causal attention in which several query heads share a key head."""

    site: Site  # its part of the engine's cache, where an engine serves the model

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        kv = config.kv_heads * config.head
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, kv, bias=False)
        self.v = nn.Linear(config.width, kv, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, time, width = x.shape
        head = self.config.head
        q = rotate(self.q(x).view(batch, time, -1, head).transpose(1, 2), turn)
        k = rotate(self.k(x).view(batch, time, -1, head).transpose(1, 2), turn)
        v = self.v(x).view(batch, time, -1, head).transpose(1, 2)
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            keys, values = cache
            keys.index_copy_(2, positions, k)
            values.index_copy_(2, positions, v)
            seen = torch.arange(keys.shape[2], device=x.device) <= positions[:, None]
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))

    def paged(self, x: Tensor, turn: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        """The same over the engine's cache: `x` is a flat row of tokens, (time, width)."""
        head = self.config.head
        q, k, v = (layer(x).view(x.shape[0], -1, head) for layer in (self.q, self.k, self.v))
        q, k = (rotate(each.transpose(0, 1), turn).transpose(0, 1) for each in (q, k))
        return self.out(self.site(q, k, v, step, head**-0.5).flatten(1))


class MLP(nn.Module):
    """A gate, SiLU, and the way back down."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Normalise, attend, add; normalise, transform, add."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=config.eps)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.width, eps=config.eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, turn: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.norm1(x), turn, positions, cache)
        return x + self.mlp(self.norm2(x))

    def paged(self, x: Tensor, turn: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        x = x + self.attention.paged(self.norm1(x), turn, step)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Embedding, blocks, a norm and a head."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(_init)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device)
        logits = self.head(self.hidden(idx, positions, None))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def hidden(self, idx: Tensor, positions: Tensor, cache: Cache | None) -> Tensor:
        x = self.tokens(idx)
        turn = turns(positions, self.config, x.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x, turn, positions, None if cache is None else (cache.keys[i], cache.values[i]))
        return self.norm(x)

    def decode(self, idx: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits of the last of the given tokens, whose keys and values go into the cache at `positions`."""
        return self.head(self.hidden(idx, positions, cache)[:, -1])

    # --- the protocol of tessera.Engine ---

    longest: int | None = None
    stops: tuple[int, ...] = ()

    @property
    def vocabulary(self) -> int:
        return self.config.vocab

    def layers(self) -> list[Layer]:
        return [Layer(self.config.kv_heads, self.config.head, self.config.head)] * self.config.layers

    def take_sites(self, sites: Sequence[Site]) -> None:
        for block, site in zip(self.blocks, sites, strict=True):
            cast("Block", block).attention.site = site

    def paged_forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, step: tuple[Tensor, ...]) -> Tensor:
        x = self.tokens(tokens)
        turn = turns(positions, self.config, x.dtype)
        for block in self.blocks:
            x = cast("Block", block).paged(x, turn, step)
        return self.head(self.norm(x if rows is None else x[rows]))


def turns(positions: Tensor, config: LlamaConfig, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of the rotary angles, `(2, time, head)`."""
    half = torch.arange(0, config.head, 2, device=positions.device).float() / config.head
    angles = torch.outer(positions.float(), config.theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary position embedding of `(batch, heads, time, head)`."""
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-second, first), dim=-1) * turn[1]


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
