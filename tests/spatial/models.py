"""Small models that the compiler for spatial machines is tried on, and toy machines of other grids."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

from tessera.machines.find import spatial_machine
from tessera.machines.spatial import SpatialMachine, read


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
