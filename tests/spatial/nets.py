"""Small models that the compiler for spatial machines is tried on, and toy machines of other grids."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

from tessera.machines.find import spatial_machine
from tessera.machines.spatial import SpatialMachine, read
from tessera.ops.experts import experts


class MLP(nn.Module):
    def __init__(self, wide: int = 64, inner: int = 128) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(wide, inner), nn.Linear(inner, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Grouped queries, with a norm before and one behind."""

    def __init__(self, wide: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, each = heads, groups, wide // heads
        self.q, self.o = nn.Linear(wide, wide), nn.Linear(wide, wide)
        self.k, self.v = nn.Linear(wide, each * groups), nn.Linear(wide, each * groups)
        self.before, self.behind = nn.LayerNorm(wide), nn.RMSNorm(wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, wide = x.shape
        y = self.before(x)
        q = self.q(y).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (f(y).view(batch, length, self.groups, -1).transpose(1, 2) for f in (self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.behind(x + self.o(a.transpose(1, 2).reshape(batch, length, wide)))


class Block(nn.Module):
    """A block of GPT."""

    def __init__(self, wide: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.qkv, self.o = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, wide = x.shape
        parts = self.qkv(self.ln_1(x)).split(wide, -1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, wide))
        return x + self.mlp(self.ln_2(x))


class MoE(nn.Module):
    """Each row goes to two of eight experts."""

    def __init__(self, wide: int = 32, inner: int = 32, count: int = 8, capacity: float | None = None) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(wide, count, bias=False), capacity
        self.up, self.gate = (nn.Parameter(torch.randn(count, inner, wide) / wide**0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(count, wide, inner) / inner**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, places = self.router(x).topk(2, -1)
        shares = torch.softmax(scores, -1)
        return x + experts(x, places, shares, self.up, self.down, self.gate, capacity=self.capacity)


class Many(nn.Module):
    """Reductions along any dimension, choices, moves."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.softmax(x, 1), F.log_softmax(x, -1), x.mean((0, 2)), x.var(-1), x.argmax(-1), x.amax(1), x.sum(),
            torch.where(x > 0, x, 0.1 * x), torch.cat([x, x * 2], 1), x.transpose(0, 2).reshape(7, -1),
            x.clamp(-1, 1) ** 2,
        )  # fmt: skip


def convolutions() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8)
    return nn.Sequential(*layers).eval()


def toy(down: int, across: int, extra: str = "", **figures: object) -> SpatialMachine:
    """The toy with another grid, other figures, further tables."""
    text = spatial_machine("toy").text.replace("[[2, 2]", f"[[{down}, {across}]")
    for name, value in figures.items():
        text, count = re.subn(rf"^{name} = \[(\"[^\"]*\"|[^,]*),", f"{name} = [{value},", text, flags=re.M)
        assert count, name
    return read(f"toy{down}x{across}", text + extra)


class Decoder(nn.Module):
    """One layer of a Llama that decodes: rotary tables by position, a cache that is written in place."""

    def __init__(self, wide: int, heads: int, groups: int, inner: int, longest: int) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, wide // heads
        self.n1, self.n2 = nn.RMSNorm(wide, eps=1e-6), nn.RMSNorm(wide, eps=1e-6)
        self.q, self.o = (nn.Linear(wide, wide, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(wide, groups * self.each, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(wide, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, wide, bias=False)
        self.register_buffer("keys", torch.zeros(longest, groups, self.each))
        self.register_buffer("values", torch.zeros(longest, groups, self.each))

    def forward(self, x: torch.Tensor, at: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor):
        y = self.n1(x)
        q, k = (f(y).view(1, -1, self.each) for f in (self.q, self.k))
        q, k = (t * cos + torch.cat([-t[..., self.each // 2 :], t[..., : self.each // 2]], -1) * sin for t in (q, k))
        self.keys[at] = k
        self.values[at] = self.v(y).view(1, self.groups, self.each)
        keys, values = (t.transpose(0, 1)[None] for t in (self.keys, self.values))
        a = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self.o(a.reshape(1, -1))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Gives the next word for a word and its position."""

    def __init__(self, layers=2, wide=32, heads=4, groups=2, inner=48, words=64, longest=16) -> None:  # noqa: ANN001
        super().__init__()
        self.embed, self.head = nn.Embedding(words, wide), nn.Linear(wide, words, bias=False)
        self.layers = nn.ModuleList(Decoder(wide, heads, groups, inner, longest) for _ in range(layers))
        self.norm, each = nn.RMSNorm(wide, eps=1e-6), wide // heads
        angles = torch.arange(longest)[:, None] / 10000 ** (torch.arange(0, each, 2) / each).repeat(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.longest = longest

    def forward(self, word: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(word), (torch.arange(self.longest) <= at)[None, None, None]
        for layer in self.layers:
            x = layer(x, at, self.cos[at], self.sin[at], mask)
        return self.head(self.norm(x)).argmax(-1)
